"""Every HTTP body between the roles and the proxy. About 1 KB each; no tensors, no paths.

The proxy states nothing here that a reader could not find in the bucket, except who is alive and who
works on what.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

WorkerId = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,63}$")]
GroupIdText = Annotated[str, Field(pattern=r"^\d{4}-\d{8}$")]
AttemptId = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,80}$")]


class Message(BaseModel):
    """Unknown fields are ignored, so that old and new jobs can share a run."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class PolicyHead(Message):
    """`GET /v1/policy?after=V`: the newest committed version. The log record it points to has the files."""

    run_id: str
    version: int
    step: int
    log_seq: int
    log_sha256: str
    """Digest of the log record that commits this version: the reader verifies what it fetches."""
    consumed_cursor: int
    finished: bool
    """All steps are committed; workers exit."""
    record: str = ""
    """The log record itself, so that not every worker gets it from the bucket; empty if it is large."""


class LeaseRequest(Message):
    """`POST /v1/leases`."""

    worker_id: WorkerId
    max_groups: Annotated[int, Field(ge=1, le=1024)]
    loaded_version: int
    """Newest version that the worker's engine serves."""


class Lease(Message):
    """One group to sample. The prompt follows from the task and the group id."""

    lease_id: str
    group_id: GroupIdText
    ordinal: int
    policy_version: int
    """Newest committed version at issue; sample with it or a newer one."""
    seconds: float
    """Time until the group may be issued again unless renewed (a heartbeat renews the leases that it names)."""
    partial_attempt: AttemptId | None = None
    """Attempt that was cut and whose completions, in the bucket's `partial/`, are to be continued."""


class LeaseReply(Message):
    leases: tuple[Lease, ...]
    wait_seconds: float = 0.0
    """When to ask again if there are fewer leases than asked for."""
    reason: Literal["ok", "staleness_bound", "finished", "no_policy"] = "ok"


class WorkerRef(Message):
    """Body of `POST /v1/leases/{id}/renew`."""

    worker_id: WorkerId


class Release(WorkerRef):
    """`POST /v1/leases/{id}/release`: the worker gives the group back."""

    partial_attempt: AttemptId | None = None
    """Attempt under which what was drawn so far is in the bucket's `partial/`."""


class Completion(Message):
    """`POST /v1/leases/{id}/complete`: the trajectory object is in the bucket."""

    worker_id: WorkerId
    group_id: GroupIdText
    attempt: AttemptId
    size: int
    sha256: str
    tokens: int
    mean_reward: float


class HeldLease(Message):
    """Lets a proxy that has just started adopt the work in flight."""

    lease_id: str
    group_id: GroupIdText


class RolloutState(Message):
    """What a rollout worker reports with each heartbeat."""

    role: Literal["rollout"] = "rollout"
    worker_id: WorkerId
    engine: str
    loaded_version: int
    leases: tuple[HeldLease, ...] = ()
    running_requests: int = 0
    target_requests: int = 0
    """That the engine has room for, as far as the worker knows; 0 while it starts."""
    tokens_generated: int = 0
    """Since the worker started."""
    tokens_per_second: float = 0.0
    """Over the last heartbeat interval."""
    groups_uploaded: int = 0
    completions_dropped: int = 0
    mean_completion_tokens: float = 0.0
    store_requests: int = 0
    """Sent to the bucket since the worker started."""
    state: Literal["starting", "running", "draining"] = "running"
    note: str = ""
    """One line for people: what the worker is busy with."""


class QuarantinedAttempt(Message):
    group_id: GroupIdText
    attempt: AttemptId


class LearnerState(Message):
    """What the learner reports with each heartbeat."""

    role: Literal["learner"] = "learner"
    learner_id: WorkerId
    epoch: int
    step: int
    phase: Literal["starting", "waiting", "training", "publishing", "finished"]
    groups_ready: int = 0
    tokens_per_second: float = 0.0
    pending_skips: tuple[int, ...] = ()
    """Ordinals that the next commit will consume untrained (zero variance, stale). They no longer count
    as outstanding; otherwise a batch whose groups are mostly skipped could never fill."""
    quarantined: tuple[QuarantinedAttempt, ...] = ()
    """Attempts refused since the last heartbeat: their groups must be issued again."""
    log_seq: int = -1
    """Newest log record that the learner knows: a proxy that is behind reads the log at once."""
    store_requests: int = 0
    """Sent to the bucket since the learner started."""
    note: str = ""


class Heartbeat(Message):
    """`POST /v1/heartbeats`."""

    state: Annotated[RolloutState | LearnerState, Field(discriminator="role")]


class HeartbeatReply(Message):
    version: int
    """Newest committed version, -1 before the first commit."""
    finished: bool
    directives: tuple[Literal["drain"], ...] = ()


class UploadedGroups(Message):
    """`GET /v1/uploads?groups=N&log_seq=S&wait=W`: answered as soon as N groups are there."""

    groups: int
    """In the bucket and not consumed by the log up to `log_seq`, as far as the proxy was told."""
    log_seq: int
    """Newest record that the proxy has read; below S, `groups` counts what is consumed by now."""


class StepSummary(Message):
    """One row of `GET /v1/steps`."""

    step: int
    version: int
    log_seq: int
    written_at: str
    groups: int
    skipped: int
    metrics: dict[str, float]


class WorkerSummary(Message):
    """One row of `GET /v1/workers`."""

    id: str
    role: Literal["rollout", "learner"]
    alive: bool
    seconds_since_seen: float
    leases: int
    state: RolloutState | LearnerState


class LeaseCounts(Message):
    active: int
    outstanding_groups: int
    """Issued and not consumed."""
    max_outstanding_groups: int
    issued_total: int
    completed_total: int
    expired_total: int
    reissued_total: int


class RunStatus(Message):
    """`GET /v1/run`: made for `curl | jq`."""

    run_id: str
    name: str
    bucket: str
    step: int
    steps: int
    version: int
    finished: bool
    reward: float | None
    """Mean reward of the newest step; null before the first."""
    staleness_mean: float | None
    staleness_max: float | None
    workers_alive: int
    learner_alive: bool
    leases: LeaseCounts
    rollout_tokens_per_second: float
    steps_per_minute: float
    store_requests: dict[str, int] = {}
    """Sent to the bucket by all members of a role, counted since this proxy first heard of each."""
    store_requests_per_minute: float = 0.0
    """Of all roles, over the last 5 minutes."""
    proxy_started_at: str
    run_started_at: str
    last_commit_at: str | None
    seconds_since_commit: float | None


class GroupStatus(Message):
    """`GET /v1/groups/{id}`."""

    group_id: str
    state: Literal["not_issued", "leased", "uploaded", "consumed"]
    worker_id: str | None = None
    attempts: tuple[str, ...] = ()


class Problem(Message):
    """Body of every error answer."""

    error: str
