"""One whole run, disturbed or not, and what the bucket says about it afterwards."""

import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.roles import Fleet, Role, cli, fleet
from tests.support.relay import faulty_relay
from tests.support.s3 import S3Server

from benchmarks.chaos.forked_roles import ForkedRole
from benchmarks.chaos.plan import Strike
from benchmarks.chaos.store_faults import StoreFaults
from benchmarks.chaos.supervisor import Chaos, LogWatch, Outcome
from bucketrl.bucket import keys
from bucketrl.bucket.audit import AuditReport, audit
from bucketrl.bucket.records import EvaluationRecord, RunRecord, StepRecord, decode
from bucketrl.bucket.store import Store
from bucketrl.bucket.stores import open_store
from bucketrl.jobs.runs import read_log

CONFIG = """
name = "chaos"
seed = {seed}
[model]
id = "tiny-arithmetic"
[lora]
rank = 8
alpha = 16.0
[task]
kind = "arithmetic"
terms = 2
max_operand = 99
answer_rule = "whole"
[sampling]
group_size = 8
max_tokens = 8
[algorithm]
steps = {steps}
groups_per_step = 8
max_staleness = 4
learning_rate = 2e-3
[rollout]
max_model_len = 64
lease_seconds = 20
[learner]
tokens_per_microbatch = 4096
"""
TAIL = 10
"""Steps whose rewards are averaged."""
PROBLEMS = 200
"""Held out."""
QUIET_S = 900.0


@dataclass(frozen=True)
class Setting:
    """What all runs of one benchmark share."""

    engine: str
    workers: int
    steps: int
    seed: int
    folder: Path

    @property
    def role_type(self) -> type[Role]:
        """vLLM's own processes cannot be forked: there, each start takes its imports."""
        return ForkedRole if self.engine == "transformers" else Role


@dataclass(frozen=True)
class Result:
    """One run."""

    outcome: Outcome
    audit: AuditReport
    log_changed: tuple[int, ...]
    """Sequence numbers of records that were not at the end what they had been."""
    steps: int
    rewards: tuple[float, ...]
    """Mean of each step."""
    stale: int
    """Groups skipped for their age."""

    @property
    def reward(self) -> float:
        return statistics.fmean(self.rewards[-TAIL:])

    @property
    def standard_error(self) -> float:
        """Of `reward`, from the spread of its steps."""
        return statistics.stdev(self.rewards[-TAIL:]) / len(self.rewards[-TAIL:]) ** 0.5


def run(
    setting: Setting,
    name: str,
    server: S3Server,
    strikes: Sequence[Strike],
    *,
    faults: StoreFaults | None = None,
    say: Callable[[str], None],
) -> Result:
    """One whole run below the prefix `name` of `server`, audited."""
    folder = setting.folder / name
    folder.mkdir()
    config = folder / "chaos.toml"
    config.write_text(CONFIG.format(seed=setting.seed, steps=setting.steps))
    url = f"s3://{server.bucket}/{name}"
    made = cli("create", str(config), "--bucket", url, env=server.environment)
    if made.returncode != 0:
        raise AssertionError(made.stderr)
    store = open_store(server.url(name))
    watch = LogWatch(store)
    with (
        faulty_relay(server, faults or (lambda *_: None)) as relay,
        _fleet(setting, url, folder, relay) as roles,
    ):
        chaos = Chaos(roles, watch, steps=setting.steps, say=say)
        outcome = chaos.go(strikes, quiet_s=QUIET_S)
    return _judge(store, watch, outcome)


def _fleet(setting: Setting, url: str, folder: Path, server: S3Server) -> AbstractContextManager[Fleet]:
    cache = ("--cache-dir", str(folder / "cache"))
    return fleet(
        url,
        folder,
        workers=setting.workers,
        engine=setting.engine,
        env=server.environment,
        role_type=setting.role_type,
        learner=("--keep", "0", "--threads", "1", *cache),
        rollout=cache,
    )


def _judge(store: Store, watch: LogWatch, outcome: Outcome) -> Result:
    watch.look()
    record = decode(RunRecord, store.get(keys.RUN))
    commits = [entry for entry in read_log(store, record) if isinstance(entry, StepRecord)]
    return Result(
        outcome=outcome,
        audit=audit(store),
        log_changed=tuple(watch.changed()),
        steps=commits[-1].step,
        rewards=tuple(commit.metrics["reward_mean"] for commit in commits if commit.step > 0),
        stale=sum(skipped.reason == "stale" for commit in commits for skipped in commit.skipped),
    )


def heldout(name: str, server: S3Server) -> float:
    """Accuracy of run `name`'s newest version."""
    arguments = ("--bucket", f"s3://{server.bucket}/{name}", "--problems", str(PROBLEMS))
    done = cli("evaluate", *arguments, "--engine", "transformers", env=server.environment)
    if done.returncode != 0:
        raise AssertionError(done.stderr)
    store = open_store(server.url(name))
    [info] = store.list(keys.EVALUATION_PREFIX)
    return decode(EvaluationRecord, store.get(info.key)).mean_reward


def replay(setting: Setting, name: str, server: S3Server) -> bool:
    """Whether the batches of run `name`, trained again, give every adapter's bytes."""
    target = setting.folder / f"{name}-replayed"
    done = cli("replay", f"s3://{server.bucket}/{name}", str(target), env=server.environment, timeout=900)
    print(done.stdout.strip() or done.stderr.strip()[-2000:])
    return done.returncode == 0
