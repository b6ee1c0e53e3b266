"""`GET /metrics`: Prometheus text, made from the proxy's state at the moment it is asked."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from bucketrl.proxy.core import ProxyCore
from bucketrl.proxy.status import run_status


class CoreCollector(Collector):
    """Reads one `ProxyCore`. Step metrics keep their names from the commit records."""

    def __init__(self, core: ProxyCore) -> None:
        self._core = core

    def collect(self) -> Iterator[Metric]:
        status = run_status(self._core)
        counts = status.leases
        gauges: dict[str, tuple[str, float | None]] = {
            "step": ("Optimizer steps committed.", status.step),
            "steps_planned": ("Optimizer steps of the run.", status.steps),
            "policy_version": ("Newest committed policy version; -1 before the first.", status.version),
            "workers_alive": ("Rollout workers heard of lately.", status.workers_alive),
            "learner_alive": ("1 if the learner was heard of lately.", float(status.learner_alive)),
            "rollout_tokens_per_second": ("Sampled by all workers.", status.rollout_tokens_per_second),
            "steps_per_minute": ("Median over recent commits.", status.steps_per_minute),
            "store_requests_per_minute": (
                "Sent to the bucket by all roles, over 5 minutes.",
                status.store_requests_per_minute,
            ),
            "leases_active": ("Leases held by workers.", counts.active),
            "groups_outstanding": ("Groups issued and not consumed.", counts.outstanding_groups),
            "groups_outstanding_limit": ("Bound that keeps staleness.", counts.max_outstanding_groups),
            "seconds_since_commit": ("Since the proxy saw the newest commit.", status.seconds_since_commit),
        }
        for name, (text, value) in gauges.items():
            if value is not None:
                yield GaugeMetricFamily(f"bucketrl_{name}", text, value=value)
        newest = self._core.steps[-1].metrics if self._core.steps else {}
        family = GaugeMetricFamily(
            "bucketrl_step_metric", "Metrics of the newest commit record.", labels=["name"]
        )
        for name, value in sorted(newest.items()):
            family.add_metric([name], value)
        yield family
        counters = {
            "leases_issued": ("Leases given out.", counts.issued_total),
            "leases_expired": ("Leases taken back.", counts.expired_total),
            "groups_reissued": ("Groups issued again.", counts.reissued_total),
            "groups_doubled": (
                "Late groups given to a second worker as well.",
                self._core.scheduler.totals.tail,
            ),
            "groups_completed": ("Uploads announced.", counts.completed_total),
        }
        for name, (text, total) in counters.items():
            yield CounterMetricFamily(f"bucketrl_{name}", text, value=total)
        requests = CounterMetricFamily("bucketrl_store_requests", "Sent to the bucket.", labels=["role"])
        for role, number in sorted(status.store_requests.items()):
            requests.add_metric([role], number)
        yield requests


def render(core: ProxyCore) -> bytes:
    """Prometheus exposition text."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(CoreCollector(core))
    return generate_latest(registry)
