"""Hand-written stand-ins: an engine, a proxy, a learner, a task. What they do is what the tests can see."""

import asyncio
import hashlib
import itertools
import json
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from bucketrl.api.client import ProxyRefused, ProxyUnavailable
from bucketrl.api.messages import (
    Completion,
    Heartbeat,
    HeartbeatReply,
    Lease,
    LeaseReply,
    LeaseRequest,
    PolicyHead,
)
from bucketrl.bucket import keys
from bucketrl.bucket.artifacts import publish
from bucketrl.bucket.config import RunConfig
from bucketrl.bucket.errors import StoreError
from bucketrl.bucket.log import LogReader, LogWriter
from bucketrl.bucket.records import (
    Canary,
    CheckpointRef,
    FileRef,
    GroupRef,
    LogRecord,
    ModelIdentity,
    PolicyRef,
    RunRecord,
    StepRecord,
    sha256_hex,
)
from bucketrl.bucket.store import Store
from bucketrl.bucket.stores.memory import MemoryStore
from bucketrl.bucket.trajectories import TrajectoryGroup, decode
from bucketrl.rollout_worker.engine import (
    DroppedCompletion,
    EngineCapacity,
    SampledCompletion,
    SamplingRequest,
)
from bucketrl.tasks.base import FinishReason, Prompt, Reward, Split

PROMPTS = 1000
CANARY_TOKENS = tuple(range(8))
BASE_LOGPROBS = (-1.0,) * 7


def make_run(**sections: Any) -> RunRecord:
    settings: dict[str, Any] = {
        "name": "test",
        "seed": 3,
        "model": {"id": "fake"},
        "lora": {"rank": 8, "alpha": 16.0},
        "task": {"kind": "fake"},
        "sampling": {"group_size": 3, "max_tokens": 8},
        "algorithm": {"steps": 100, "groups_per_step": 2, "max_staleness": 1},
        "rollout": {"max_model_len": 32, "lease_seconds": 5.0},
    }
    return RunRecord(
        run_id="run-1",
        created_at="2026-01-01T00:00:00Z",
        bucketrl_version="0",
        config=RunConfig(**(settings | sections)),
        model=ModelIdentity(weights_sha256="w", tokenizer_sha256="t"),
        prompts_per_epoch=PROMPTS,
        write_id="x",
    )


def adapter_config(run: RunRecord, **changes: Any) -> dict[str, Any]:
    """What PEFT writes, as far as it is looked at."""
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": run.config.model.id,
        "r": run.config.lora.rank,
        "lora_alpha": run.config.lora.alpha,
        "bias": "none",
        "target_modules": ["q_proj", "v_proj"],
        "use_dora": False,
        "modules_to_save": None,
        "rank_pattern": {},
    }
    return config | changes


class FakeLearner:
    """Commits policy versions to a store. The "weights" are the canary's logprobs under them."""

    def __init__(self, store: Store, run: RunRecord, folder: Path) -> None:
        self._store = store
        self._run = run
        self._folder = folder
        ids = itertools.count()
        self.reader = LogReader(store, run)
        self._writer = LogWriter(
            self.reader, self._create, now=lambda: "2026-01-01T00:00:00Z", new_id=lambda: f"id{next(ids)}"
        )
        self._writer.start("learner")

    def _create(self, key: str, data: bytes) -> None:
        self._store.create(key, data)

    def commit(self, consume: tuple[int, ...] = (), **config_changes: Any) -> StepRecord:
        """The next step; after step 0 it has to consume some group ordinals. The rest goes into
        adapter_config.json."""
        before = self.reader.state.step
        version = before.step + 1 if before else 0
        folder = self._folder / f"learner-{version}"
        folder.mkdir()
        logprobs = tuple(-2.0 - 0.1 * version - 0.01 * n for n in range(7))
        config = adapter_config(self._run, **config_changes)
        (folder / "adapter_config.json").write_text(json.dumps(config))
        (folder / "adapter_model.safetensors").write_text(json.dumps(logprobs))
        files = publish(self._store, keys.policy(version, self._writer.epoch), folder)
        placeholder = FileRef(key="batches/x", size=0, sha256="")

        def build(header: LogRecord) -> StepRecord:
            return StepRecord(
                **header.model_dump(),
                step=version,
                policy=PolicyRef(version=version, files=files),
                checkpoint=CheckpointRef(step=version, files=()),
                batch=placeholder if version else None,
                groups=tuple(
                    GroupRef(
                        group_id=str(keys.GroupId.from_ordinal(ordinal, PROMPTS)),
                        attempt="a",
                        file=placeholder,
                    )
                    for ordinal in consume
                ),
                consumed=self.reader.state.consumed.add(set(consume)),
                canary=Canary(token_ids=CANARY_TOKENS, logprobs=logprobs, base_logprobs=BASE_LOGPROBS),
            )

        return self._writer.append_step(build)

    def head(self) -> PolicyHead | None:
        state = self.reader.state
        if state.step is None:
            return None
        return PolicyHead(
            run_id=self._run.run_id,
            version=state.step.policy.version,
            step=state.step.step,
            log_seq=state.step_seq,
            log_sha256=state.step_sha256,
            consumed_cursor=state.consumed.cursor,
            finished=state.step.step >= self._run.config.algorithm.steps,
        )


class FakeProxy:
    """The part of ProxyClient that a worker uses. Leases in order, released groups first."""

    def __init__(self, learner: FakeLearner) -> None:
        self._learner = learner
        self._ids = itertools.count()
        self._next = 0
        self._again: list[int] = []
        self._lock = threading.Lock()
        self.down = False
        self.refuse: int | None = None
        self.limit = 10**9
        """Groups issued at most."""
        self.finished = False
        self.drain = False
        self.run_id: str | None = None
        self.leased: dict[str, int] = {}
        self.requests: list[LeaseRequest] = []
        self.completed: list[tuple[str, Completion]] = []
        self.released: list[str] = []
        self.partial: dict[int, str] = {}
        """Newest partial attempt that a release has named, by ordinal."""
        self.heartbeats: list[Heartbeat] = []

    def _answer(self) -> None:
        if self.down:
            raise ProxyUnavailable("http://proxy: ConnectError")
        if self.refuse is not None:
            raise ProxyRefused(self.refuse, "http://proxy: wrong token")

    def policy(self, after: int, wait_s: float) -> PolicyHead | None:
        deadline = time.monotonic() + min(wait_s, 0.05)
        while True:
            self._answer()
            head = self._learner.head()
            if head is not None and head.version > after:
                return head.model_copy(update={"run_id": self.run_id or head.run_id})
            if time.monotonic() > deadline:
                return None
            time.sleep(0.005)

    def lease(self, request: LeaseRequest) -> LeaseReply:
        self._answer()
        with self._lock:
            self.requests.append(request)
            if self.finished:
                return LeaseReply(leases=(), reason="finished")
            ordinals = [self._again.pop(0) for _ in range(min(len(self._again), request.max_groups))]
            while len(ordinals) < request.max_groups and self._next < self.limit:
                ordinals.append(self._next)
                self._next += 1
            head = self._learner.head()
            assert head is not None
            leases = tuple(
                Lease(
                    lease_id=f"lease-{next(self._ids)}",
                    group_id=str(keys.GroupId.from_ordinal(ordinal, PROMPTS)),
                    ordinal=ordinal,
                    policy_version=head.version,
                    seconds=5.0,
                    partial_attempt=self.partial.get(ordinal),
                )
                for ordinal in ordinals
            )
            self.leased |= {lease.lease_id: lease.ordinal for lease in leases}
            return LeaseReply(leases=leases, wait_seconds=0.1)

    def complete(self, lease_id: str, completion: Completion) -> None:
        self._answer()
        self.completed.append((lease_id, completion))

    def release(self, lease_id: str, worker_id: str, partial_attempt: str | None = None) -> None:
        self._answer()
        with self._lock:
            if partial_attempt is not None:
                self.partial[self.leased[lease_id]] = partial_attempt
            self.released.append(lease_id)
            self._again.append(self.leased[lease_id])

    def heartbeat(self, beat: Heartbeat) -> HeartbeatReply:
        self._answer()
        self.heartbeats.append(beat)
        head = self._learner.head()
        return HeartbeatReply(
            version=head.version if head else -1,
            finished=self.finished,
            directives=("drain",) if self.drain else (),
        )


def tokens_of_seed(request: SamplingRequest) -> tuple[int, ...]:
    """New tokens of a request: how many and which depends on its seed alone."""
    digest = hashlib.sha256(str(request.seed).encode()).digest()
    return tuple(digest[1 : 2 + digest[0] % request.max_tokens])


def logprob_of(token: int, version: int) -> float:
    """Under the fake engine; exact in float32."""
    return -0.25 - token / 256 - version / 64


class FakeEngine:
    """Draws tokens from the request's seed. `score` returns what the adapter's files say."""

    name = "fake 1"
    stop_token_ids: tuple[int, ...] = (0,)
    capacity = EngineCapacity(kv_tokens=None, max_requests=1024)

    def __init__(self) -> None:
        self.folders: dict[int, Path] = {}
        self.serves_base = 0
        """How many more times the base model is served instead of the adapter."""
        self.before_draw: Callable[[SamplingRequest], Awaitable[None]] | None = None
        self.tokens: Callable[[SamplingRequest], tuple[int, ...]] = tokens_of_seed
        """All that an undisturbed request draws."""
        self.drawn: Callable[[SamplingRequest], int] = lambda request: 0
        """Of these, how many an aborted request has drawn; it never is all of them."""
        self.requests: list[SamplingRequest] = []
        self.running: set[str] = set()
        self._aborts: dict[str, asyncio.Event] = {}
        self.removed: list[int] = []
        self.closed = False

    async def start(self) -> None:
        await asyncio.sleep(0)

    async def add_adapter(self, version: int, folder: Path) -> None:
        assert version not in self.folders
        assert (folder / "adapter_config.json").exists()
        self.folders[version] = folder

    async def remove_adapter(self, version: int) -> None:
        del self.folders[version]
        self.removed.append(version)

    async def generate(self, request: SamplingRequest) -> SampledCompletion:
        if request.policy_version not in self.folders:
            raise KeyError(request.policy_version)
        self.requests.append(request)
        self.running.add(request.request_id)
        self._aborts[request.request_id] = asyncio.Event()
        try:
            await asyncio.sleep(0.001)
            aborted = await self._wait(request)
        finally:
            self.running.remove(request.request_id)
            del self._aborts[request.request_id]
        # A version may go only when no request uses it.
        assert request.policy_version in self.folders
        tokens = self.tokens(request)
        if aborted:
            tokens = tokens[: min(self.drawn(request), len(tokens) - 1)]
        ended: FinishReason = "length" if len(tokens) == request.max_tokens else "stop"
        return SampledCompletion(
            token_ids=tokens,
            logprobs=tuple(logprob_of(token, request.policy_version) for token in tokens),
            policy_versions=(request.policy_version,) * len(tokens),
            finish_reason="abort" if aborted else ended,
        )

    async def _wait(self, request: SamplingRequest) -> bool:
        """For `before_draw` or an abort; whether it was the latter."""
        if self.before_draw is None:
            return False
        abort = asyncio.ensure_future(self._aborts[request.request_id].wait())
        draw = asyncio.ensure_future(self.before_draw(request))
        try:
            await asyncio.wait((abort, draw), return_when=asyncio.FIRST_COMPLETED)
            if draw.done():
                draw.result()
            return not draw.done()
        finally:
            abort.cancel()
            draw.cancel()

    async def abort(self, request_id: str) -> None:
        if request_id in self._aborts:
            self._aborts[request_id].set()

    async def score(self, token_ids: tuple[int, ...], version: int | None) -> list[float]:
        assert token_ids == CANARY_TOKENS
        if version is None or self.serves_base > 0:
            self.serves_base -= 1
            return list(BASE_LOGPROBS)
        return list(json.loads((self.folders[version] / "adapter_model.safetensors").read_text()))

    async def close(self) -> None:
        self.closed = True
        self.folders.clear()


class FakeTask:
    """Prompt n asks "n"; the reward is 1 for an even number of characters."""

    def size(self, split: Split) -> int:
        return PROMPTS if split == "train" else 20

    def prompt(self, split: Split, index: int) -> Prompt:
        return Prompt(index, ({"role": "user", "content": f"{split} {index}"},), reference=index)

    def score(self, prompt: Prompt, completion: str, finish_reason: FinishReason) -> Reward:
        even = float(len(completion) % 2 == 0)
        return Reward(even, {"correct": even, "finished": float(finish_reason == "stop")})


class FakeRewards:
    """RewardPool without processes."""

    def __init__(self, task: FakeTask) -> None:
        self._task = task

    async def start(self) -> None:
        await asyncio.sleep(0)

    async def score(self, prompt: Prompt, completion: str, finish_reason: FinishReason) -> Reward:
        await asyncio.sleep(0)
        return self._task.score(prompt, completion, finish_reason)

    async def close(self) -> None:
        await asyncio.sleep(0)


class FakeTokenizer:
    """One token per character. The template marks the turns."""

    eos_token: str | None = ">"
    eos_token_id: int | None = 0
    chat_template: str | None = "<content>"

    def apply_chat_template(self, conversation: list[dict[str, str]], **kwargs: Any) -> str:
        assert kwargs == {"tokenize": False, "add_generation_prompt": True}
        return "".join(f"<{message['content']}>" for message in conversation)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(character) for character in text]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(chr(97 + token % 26) for token in token_ids)


class FlakyStore(MemoryStore):
    """Fails puts of trajectories and partial groups while `broken`."""

    def __init__(self) -> None:
        super().__init__("flaky")
        self.broken = False
        self.failures = 0

    def put(self, key: str, data: bytes) -> None:
        if self.broken and key.startswith((keys.TRAJECTORY_PREFIX, keys.PARTIAL_PREFIX)):
            self.failures += 1
            raise StoreError(f"{key}: 503")
        super().put(key, data)


def uploaded_groups(store: Store, run: RunRecord, max_version: int) -> list[TrajectoryGroup]:
    """Every trajectory object of the store, decoded as the learner does."""
    groups = []
    for info in store.list(keys.TRAJECTORY_PREFIX):
        parsed = keys.parse_trajectory(info.key)
        assert parsed is not None, info.key
        group_id, attempt = parsed
        groups.append(
            decode(
                store.get(info.key),
                run_id=run.run_id,
                group_id=str(group_id),
                attempt=attempt,
                max_version=max_version,
            )
        )
    return groups


async def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    """Waits for a condition that other tasks bring about."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - the condition is anything, also what threads change
            await asyncio.sleep(0.005)


def digest(data: bytes) -> str:
    return sha256_hex(data)


async def drop(request: SamplingRequest) -> None:
    """For `FakeEngine.before_draw`: no completion is usable."""
    raise DroppedCompletion("logprob not finite")
