"""What garbage collection keeps: a pure function from what the log says and what is listed to what may go.

            1 ─────────────── B │ B+1 ──────────────────── N   N+1 …
    step  0 │    collected      │   kept: the newest `keep`  │ not committed yet: never touched
            └ its adapter and checkpoint stay, evaluations compare with them

N is the newest commit that the collector knows. Nothing here depends on what N really is by now: what is
collectable for one N is collectable for every later one.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from bucketrl.bucket import keys, snapshots
from bucketrl.bucket.config import RunConfig
from bucketrl.bucket.errors import UserError
from bucketrl.bucket.records import Consumed, FileRef, RunRecord, StepRecord
from bucketrl.bucket.store import ObjectInfo

DEFAULT_KEEP = 64
CHECKPOINTS_KEPT = 2
"""Of the newest commits. Only the last is needed; one more for who reads while the next is committed."""

LISTED = (
    keys.BATCH_PREFIX,
    keys.POLICY_PREFIX,
    keys.CHECKPOINT_PREFIX,
    keys.TRAJECTORY_PREFIX,
    keys.PARTIAL_PREFIX,
    keys.QUARANTINE_PREFIX,
    keys.SNAPSHOT_PREFIX,
)
"""Where `collectable` looks. Everything else (`run.json`, `log/`, `evaluations/`, foreign keys) stays."""


def least_keep(config: RunConfig) -> int:
    """Fewest commits that must stay: any version that a token may still be trained with, and two more."""
    return config.algorithm.max_staleness + 2


def resolve_keep(config: RunConfig, asked: int | None) -> int:
    """How many commits to keep; 0: all. None asks for the default. Raises UserError for too few."""
    least = least_keep(config)
    if asked is None:
        return max(DEFAULT_KEEP, least)
    if 0 < asked < least:
        raise UserError(f"--keep {asked}: a run with max_staleness {least - 2} needs {least} commits or more")
    return asked


@dataclass(frozen=True, slots=True)
class Retained:
    """What a collector with the newest commits of a run in hand may remove."""

    prompts_per_epoch: int
    boundary: int
    """B: what commits 1 to B name may go; 0: nothing of any commit."""
    consumed: Consumed
    """By the steps up to B."""
    version: int
    step: int
    """The newest commit's."""
    seq: int
    folders: frozenset[str]
    """Of adapters and checkpoints that must stay."""

    @classmethod
    def of(cls, run: RunRecord, first: StepRecord, newest: Sequence[StepRecord], keep: int) -> "Retained":
        """`first` is step 0; `newest` are the newest commits in order, `keep + 1` or more unless the run
        has fewer. `keep` is positive."""
        kept, last = newest[-keep:], newest[-1]
        beyond = newest[: -len(kept)]
        boundary = beyond[-1] if beyond else first
        files = [file for commit in (first, *kept) for file in commit.policy.files]
        for commit in (first, *newest[-CHECKPOINTS_KEPT:]):
            files += commit.checkpoint.files
        return cls(
            prompts_per_epoch=run.prompts_per_epoch,
            boundary=boundary.step,
            consumed=boundary.consumed,
            version=last.policy.version,
            step=last.step,
            seq=last.seq,
            folders=frozenset(_folders(files)),
        )

    def collectable(self, listed: Iterable[ObjectInfo]) -> list[ObjectInfo]:
        """Those of `listed` that nobody needs, whatever has happened since; in the order given."""
        objects = list(listed)
        pointers = [seq for info in objects if (seq := keys.parse_snapshot(info.key)) is not None]
        newest = sorted(seq for seq in pointers if seq <= self.seq)[-snapshots.KEPT :]
        return [info for info in objects if self._may_go(info.key, newest)]

    def _may_go(self, key: str, snapshots_kept: Sequence[int]) -> bool:
        if (batch := keys.parse_batch(key)) is not None:
            return batch[0] <= self.boundary
        if (artifact := keys.parse_artifact(key)) is not None:
            folder = artifact[0]
            newest = self.version if folder.startswith(keys.POLICY_PREFIX) else self.step
            # A folder of a number that is committed and that its commit does not name is an orphan for ever.
            return keys.folder_number(folder) <= newest and folder not in self.folders
        if (seq := keys.parse_snapshot(key)) is not None:
            return seq <= self.seq and seq not in snapshots_kept
        attempt = keys.parse_trajectory(key) or keys.parse_partial(key) or keys.parse_quarantine(key)
        if attempt is None or attempt[0].index >= self.prompts_per_epoch:
            return False
        return attempt[0].ordinal(self.prompts_per_epoch) in self.consumed


def _folders(files: Iterable[FileRef]) -> Iterator[str]:
    for file in files:
        if (artifact := keys.parse_artifact(file.key)) is not None:
            yield artifact[0]
