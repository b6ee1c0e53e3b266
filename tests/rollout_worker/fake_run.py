"""Hand-written stand-ins for the rest of a run: its record, a learner that commits, a proxy that leases."""

import itertools
import json
import threading
import time
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
)
from bucketrl.bucket.store import Store

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
