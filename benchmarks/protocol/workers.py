"""A proxy with 1, 10, 100 and 1,000 rollout workers: what each of their requests costs it.

The workers are simulated and take turns in virtual time: every 10 s each heartbeats twice, uploads a group, takes
another, and asks once for the newest version; a step of the learner trains on one group of each. The proxy is
asked in two ways: through its HTTP application, and at the `ProxyCore` inside, where HTTP hides nothing.
"""

import json
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from time import process_time
from typing import Any, Protocol

from fastapi import FastAPI
from tests.bucket.builders import NOW, create_in, ids

from benchmarks.protocol.costs import Progress
from benchmarks.protocol.records import ATTEMPT, large_run, unread_commit
from bucketrl.api.messages import Completion, Heartbeat, LeaseRequest
from bucketrl.bucket.log import LogReader, LogWriter
from bucketrl.bucket.stores.memory import MemoryStore
from bucketrl.proxy.app import create_app
from bucketrl.proxy.auth import Tokens
from bucketrl.proxy.core import ProxyCore

HELD = 4
"""Groups that a worker samples at a time."""
STALENESS = 4
"""Bound on groups outstanding, in groups a step: nobody is idle."""
CYCLE_S = 10.0
TOKENS = Tokens("worker-token", "read-token")
REQUESTS = ("heartbeat", "lease", "complete", "policy")
OWN_WORK = ("tick", "commit")

Body = dict[str, Any]


class Asked(Protocol):
    """A way to ask the proxy. Returns what it answers, as parsed JSON, and the CPU seconds that it took."""

    async def __call__(self, kind: str, worker: int, lease_id: str, body: Body) -> tuple[Any, float]: ...


class AtTheCore:
    def __init__(self, core: ProxyCore) -> None:
        self._core = core

    async def __call__(self, kind: str, worker: int, lease_id: str, body: Body) -> tuple[Any, float]:
        core = self._core
        begun = process_time()
        match kind:
            case "heartbeat":
                core.heartbeat(Heartbeat.model_validate(body))
                answer = None
            case "lease":
                answer = core.lease(LeaseRequest.model_validate(body))
            case "complete":
                core.complete(lease_id, Completion.model_validate(body))
                answer = None
            case _:
                answer = core.policy_head()
        spent = process_time() - begun
        return answer.model_dump() if answer else None, spent


class OverHttp:
    """Calls the ASGI application as a server does, each worker from an address of its own."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app

    async def __call__(self, kind: str, worker: int, lease_id: str, body: Body) -> tuple[Any, float]:
        method, path, query = _route(kind, lease_id, body)
        data = json.dumps(body).encode() if method == "POST" else b""
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
            "path": path, "raw_path": path.encode(), "query_string": query, "root_path": "",
            "server": ("proxy", 8080), "client": (f"10.0.{worker >> 8}.{worker & 255}", 40000),
            "headers": [
                (b"host", b"proxy:8080"), (b"authorization", b"Bearer worker-token"),
                (b"content-type", b"application/json"), (b"content-length", str(len(data)).encode()),
            ],
        }  # fmt: skip
        sent: list[Mapping[str, Any]] = []

        async def receive() -> Body:
            return {"type": "http.request", "body": data, "more_body": False}

        async def send(message: Mapping[str, Any]) -> None:
            sent.append(message)

        begun = process_time()
        await self._app(scope, receive, send)
        spent = process_time() - begun
        answer = b"".join(message.get("body", b"") for message in sent[1:])
        if sent[0]["status"] >= 400:
            raise AssertionError(f"{method} {path}: {sent[0]['status']} {answer!r}")
        return json.loads(answer) if answer else None, spent


def _route(kind: str, lease_id: str, body: Body) -> tuple[str, str, bytes]:
    match kind:
        case "heartbeat":
            return "POST", "/v1/heartbeats", b""
        case "lease":
            return "POST", "/v1/leases", b""
        case "complete":
            return "POST", f"/v1/leases/{lease_id}/complete", b""
    return "GET", "/v1/policy", f"after={body['after']}".encode()


class Fleet:
    """A proxy and its workers."""

    def __init__(self, workers: int, *, http: bool) -> None:
        self._names = [f"worker-{number}" for number in range(workers)]
        self._held: list[deque[Body]] = [deque() for _ in range(workers)]
        self._now = 1000.0
        run = self._run = large_run(workers, STALENESS)
        store = MemoryStore()
        reader = LogReader(store, run)
        self._writer = LogWriter(reader, create_in(store), now=lambda: NOW, new_id=ids("w"))
        app = create_app(
            store, run, tokens=TOKENS, serialise_commits=False, clock=lambda: self._now,
            wall=lambda: datetime.now(UTC), new_id=ids("lease"),
        )  # fmt: skip
        self._core: ProxyCore = app.state.core
        self._ask: Asked = OverHttp(app) if http else AtTheCore(self._core)
        self.spent: Counter[str] = Counter()
        """CPU seconds by kind."""
        self.asked: Counter[str] = Counter()
        self._writer.start("l")
        self._commit()

    async def begin(self) -> None:
        """Every worker has been heard of and has its groups."""
        self._core.apply_attempts(self._core.list_attempts())
        for number in range(len(self._names)):
            await self._heartbeat(number)
            await self._lease(number, HELD)
        self.spent.clear()
        self.asked.clear()

    async def cycle(self) -> None:
        """Each worker uploads one group."""
        workers, ticked = len(self._names), self._now
        for number in range(2 * workers):
            self._now += CYCLE_S / (2 * workers)
            await self._heartbeat(number % workers)
            if number < workers:
                await self._complete(number)
                await self._lease(number, 1)
            while self._now >= ticked + 1.0:
                ticked += 1.0
                self._timed("tick", self._core.tick)
        self._commit()
        for number in range(workers):
            await self._request("policy", number, body={"after": self._core.version - 1})

    async def _heartbeat(self, worker: int) -> None:
        held = [{"lease_id": one["lease_id"], "group_id": one["group_id"]} for one in self._held[worker]]
        state = {
            "role": "rollout", "worker_id": self._names[worker], "engine": "vllm 0.12.0", "loaded_version": 0,
            "leases": held, "running_requests": 32, "tokens_per_second": 1234.5,
        }  # fmt: skip
        await self._request("heartbeat", worker, body={"state": state})

    async def _lease(self, worker: int, groups: int) -> None:
        body = {"worker_id": self._names[worker], "max_groups": groups, "loaded_version": 0}
        reply = await self._request("lease", worker, body=body)
        assert len(reply["leases"]) == groups, reply
        self._held[worker].extend(reply["leases"])

    async def _complete(self, worker: int) -> None:
        lease = self._held[worker].popleft()
        body = {
            "worker_id": self._names[worker], "group_id": lease["group_id"], "attempt": ATTEMPT, "size": 30_000,
            "sha256": "0" * 64, "tokens": 4096, "mean_reward": 0.5,
        }  # fmt: skip
        await self._request("complete", worker, lease["lease_id"], body)

    async def _request(self, kind: str, worker: int, lease_id: str = "", body: Body | None = None) -> Any:
        answer, spent = await self._ask(kind, worker, lease_id, body or {})
        self.spent[kind] += spent
        self.asked[kind] += 1
        return answer

    def _commit(self) -> None:
        """The learner trains on the oldest group of each worker; the proxy reads what it says."""
        state = self._writer.state
        step = state.step.step + 1 if state.step else 0
        self._writer.append_step(
            lambda header: unread_commit(header, state.consumed, step, len(self._names), self._run)
        )
        self._timed("commit", lambda: self._core.apply_records(self._core.read()))

    def _timed(self, kind: str, work: Any) -> None:
        begun = process_time()
        work()
        self.spent[kind] += process_time() - begun
        self.asked[kind] += 1


async def measure(
    sizes: Sequence[int], *, http: bool, groups: int, rounds: int, progress: Progress
) -> dict[int, list[dict[str, float]]]:
    """By number of workers and round: CPU seconds of a request by kind, `request` of any one, and `group` of all
    that the proxy does for one. The fleets take turns; in each round each uploads about `groups` groups."""
    where = "HTTP" if http else "core"
    fleets = {size: Fleet(size, http=http) for size in sizes}
    for size, fleet in fleets.items():
        progress(f"{size} workers begin ({where})")
        await fleet.begin()
    costs: dict[int, list[dict[str, float]]] = {size: [] for size in sizes}
    for number in range(rounds):
        for size, fleet in fleets.items():
            progress(f"{size} workers ({where}): round {number + 1} of {rounds}")
            fleet.spent.clear()
            fleet.asked.clear()
            for _ in range(max(1, groups // size)):
                await fleet.cycle()
            costs[size].append(_per_request(fleet))
    return costs


def _per_request(fleet: Fleet) -> dict[str, float]:
    spent, asked = fleet.spent, fleet.asked
    each = {kind: spent[kind] / asked[kind] for kind in REQUESTS}
    each["request"] = sum(spent[kind] for kind in REQUESTS) / sum(asked[kind] for kind in REQUESTS)
    each["group"] = spent.total() / asked["complete"]
    return each
