"""Who has been heard of, and when. Soft state: heartbeats rebuild it within seconds."""

from dataclasses import dataclass, field

from bucketrl.api.messages import LearnerState, RolloutState

SILENT_AFTER_S = 15.0
"""Three heartbeat intervals."""
FORGOTTEN_AFTER_S = 3600.0
"""Silent members stay visible to people for so long."""


@dataclass(frozen=True, slots=True)
class Member:
    state: RolloutState | LearnerState
    seen_at: float

    @property
    def id(self) -> str:
        return self.state.worker_id if isinstance(self.state, RolloutState) else self.state.learner_id


@dataclass
class Roster:
    """Times are monotonic seconds, never decreasing."""

    _members: dict[str, Member] = field(default_factory=dict)
    _rollouts: dict[str, float] = field(default_factory=dict)
    """When rollout workers were heard of, longest ago first; silent ones leave when they are counted."""
    _lost: set[str] = field(default_factory=set)

    def heard(self, state: RolloutState | LearnerState, now: float) -> None:
        member = Member(state, now)
        self._members[member.id] = member
        self._lost.discard(member.id)
        self._rollouts.pop(member.id, None)
        if isinstance(state, RolloutState):
            self._rollouts[member.id] = now

    def newly_silent(self, now: float) -> list[str]:
        """Ids of rollout workers that have gone silent since the last call."""
        fresh = [
            member.id
            for member in self._members.values()
            if isinstance(member.state, RolloutState)
            and member.id not in self._lost
            and not self.is_alive(member, now)
        ]
        self._lost.update(fresh)
        for member in [m for m in self._members.values() if now - m.seen_at > FORGOTTEN_AFTER_S]:
            del self._members[member.id]
            self._lost.discard(member.id)
        return fresh

    @staticmethod
    def is_alive(member: Member, now: float) -> bool:
        return now - member.seen_at <= SILENT_AFTER_S

    def members(self) -> list[Member]:
        """Alphabetical, learners first."""
        return sorted(self._members.values(), key=lambda member: (member.state.role, member.id))

    def rollouts_alive(self, now: float) -> list[RolloutState]:
        return [
            member.state
            for member in self._members.values()
            if isinstance(member.state, RolloutState) and self.is_alive(member, now)
        ]

    def count_rollouts_alive(self, now: float) -> int:
        """Asked with every lease: walks over no more than those that have gone silent since."""
        while self._rollouts:
            longest = next(iter(self._rollouts))
            if now - self._rollouts[longest] <= SILENT_AFTER_S:
                break
            del self._rollouts[longest]
        return len(self._rollouts)

    def learner_alive(self, now: float) -> bool:
        return any(
            isinstance(member.state, LearnerState) and self.is_alive(member, now)
            for member in self._members.values()
        )
