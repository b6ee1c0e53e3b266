"""The learner's loop: groups in, policy versions out.

      rollout workers                                                    rollout workers, proxy
            │ trajectories/                                                 ▲ log/ names policy/, checkpoints/
            ▼                                                               │
      ┌─ intake ──► select ──► batches/… ────────────► trainer ──► publisher ──► log writer ─┐
      │  decode,    oldest     write-ahead: from       LoRA,       adapter,      the commit: │
      │  check      first      here on the step is     AdamW       checkpoint,   one create  │
      │                        fixed                               canary                    │
      └──────────────────────────── consumed groups, next step ◄─────────────────────────────┘

It waits for one thing only: enough groups. A crash anywhere before the commit leaves nothing visible, and
the next learner does the same step again from the batch; after it, that one goes on with the next step.
"""

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from bucketrl.bucket.errors import StoreError
from bucketrl.bucket.log import LogWriter
from bucketrl.bucket.records import Consumed, LogRecord, RunRecord, StepRecord
from bucketrl.learner.batches import Batch, Batches, next_step
from bucketrl.learner.heartbeat import Heartbeats
from bucketrl.learner.intake import Intake
from bucketrl.learner.metrics import group_metrics
from bucketrl.learner.pacing import Arrivals
from bucketrl.learner.parts import Published, Publishes, Stopped, Trains
from bucketrl.learner.select import Candidate, Selection, SkipReason, select

logger = logging.getLogger(__name__)

MAX_REPORTED_SKIPS = 4096
"""Ordinals in one heartbeat: keeps it far below the proxy's limit on bodies."""


@dataclass(frozen=True)
class Learner:
    """Everything that the loop works with, each part independent of the others."""

    run: RunRecord
    log: LogWriter
    trainer: Trains
    publisher: Publishes
    intake: Intake
    batches: Batches
    heartbeats: Heartbeats
    stop: threading.Event
    arrivals: Arrivals

    def learn(self, learner_id: str) -> None:
        """Trains until the run's last step is committed.

        Raises Fenced if another learner takes over, Stopped if `stop` is set, StoreError if the store fails
        for good. In every case the log holds whole steps only, and the next learner goes on from there.
        """
        self.log.start(learner_id)
        self._restore()
        while (step := next_step(self.log.state)) <= self.run.config.algorithm.steps:
            batch = self.batches.next(self.log.state, self._wait_for_groups)
            self.heartbeats.update(step=step, phase="training", pending_skips=_reported(batch.skipped))
            metrics = self.trainer.train(batch.groups, step, self.stop.is_set)
            metrics |= group_metrics(
                batch.trained, batch.skipped, group_size=self.run.config.sampling.group_size
            )
            self._commit(step, batch, metrics)
            self._report(step, metrics)
        self.heartbeats.update(phase="finished")

    def _restore(self) -> None:
        """To the state after the newest commit; a run without one gets its step 0."""
        self.heartbeats.update(epoch=self.log.epoch, log_seq=self.log.state.head_seq)
        newest = self.log.state.step
        if newest is None:
            self._commit(0, None, {})
            return
        self.publisher.restore(newest)
        logger.info("resuming after step %d (epoch %d)", newest.step, self.log.epoch)

    def _commit(self, step: int, batch: Batch | None, metrics: dict[str, float]) -> None:
        """Step 0 is the untrained adapter: it has no batch."""
        self.heartbeats.update(step=step, phase="publishing")
        published = self.publisher.publish(step, self.log.epoch)
        self.log.append_step(lambda header: _step_record(header, step, published, batch, metrics))
        self.heartbeats.update(log_seq=self.log.state.head_seq)

    def _wait_for_groups(self) -> Selection:
        """Looks into the bucket, as often as `arrivals` says, until a step's worth of groups is there."""
        step, consumed = next_step(self.log.state), self.log.state.consumed
        self.arrivals.begin()
        while not self.stop.is_set():
            try:
                # First, for a learner that was frozen: to a zombie, what others do now looks like corruption.
                self.log.look()
                found = self.intake.poll(consumed, max_version=step - 1)
                note = ""
            except StoreError as error:
                # Waiting is the one phase that an outage of the store may prolong; nothing is under way.
                found, note = 0, f"the store does not answer: {error}"
                logger.warning("%s; trying again", note)
            selection = select(self.intake.candidates.values(), step, self.run.config)
            if selection.ready:
                return selection
            self.heartbeats.update(
                step=step,
                phase="waiting",
                groups_ready=len(selection.trained),
                pending_skips=_reported(selection.skipped),
                note=note,
            )
            missing = self.run.config.algorithm.groups_per_step - len(selection.trained)
            self.arrivals.wait(
                wanted=len(self.intake.candidates) + missing,
                log_seq=self.log.state.head_seq,
                found=found,
                doubtful=bool(note) or self.intake.doubtful,
            )
        raise Stopped(f"asked to stop while waiting for the groups of step {step}")

    def _report(self, step: int, metrics: dict[str, float]) -> None:
        rate = metrics["tokens_per_second"]
        self.heartbeats.update(tokens_per_second=rate, groups_ready=0, pending_skips=())
        shown = ("reward_mean", "staleness_mean", "ratio_max", "grad_norm", "groups_skipped")
        logger.info("step %d: %s", step, ", ".join(f"{name} {metrics[name]:.3f}" for name in shown))


def _step_record(
    header: LogRecord, step: int, published: Published, batch: Batch | None, metrics: dict[str, float]
) -> StepRecord:
    return StepRecord(
        **header.model_dump(),
        step=step,
        policy=published.policy,
        checkpoint=published.checkpoint,
        batch=batch.ref if batch else None,
        groups=batch.record.groups if batch else (),
        skipped=batch.record.skipped if batch else (),
        consumed=batch.consumed if batch else Consumed(),
        canary=published.canary,
        metrics=metrics,
    )


def _reported(skipped: Sequence[tuple[Candidate, SkipReason]]) -> tuple[int, ...]:
    return tuple(candidate.ordinal for candidate, _ in skipped)[:MAX_REPORTED_SKIPS]
