"""A policy version on its way out and back: the adapter, the checkpoint, and the canary of the commit.

Nothing here is visible to a reader before the commit names it.
"""

import json
import random
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bucketrl.bucket import artifacts, keys
from bucketrl.bucket.records import Canary, CheckpointRef, PolicyRef, RunRecord, StepRecord
from bucketrl.bucket.store import Store
from bucketrl.learner import checkpoint
from bucketrl.learner.model import PolicyModel
from bucketrl.learner.optimizer import Optimizer
from bucketrl.learner.parts import Published

PROBE_TOKENS = 24


class Publisher:
    """Publishes the state after each step as policy version = step."""

    def __init__(
        self,
        store: Store,
        run: RunRecord,
        policy: PolicyModel,
        optimizer: Optimizer,
        staging: Path,
        data_parallel: int = 1,
    ) -> None:
        self._store = store
        self._run = run
        self._policy = policy
        self._optimizer = optimizer
        self._staging = staging
        self._data_parallel = data_parallel
        self._probe = probe_tokens(run.config.seed, policy.vocab_size)
        with policy.base_only():
            self._base_logprobs = tuple(policy.score(self._probe))

    def publish(self, step: int, epoch: int) -> Published:
        """Uploads everything, the checkpoint beside the adapter. Raises StoreError."""
        with (
            tempfile.TemporaryDirectory(dir=self._staging, prefix="adapter-") as adapter_folder,
            tempfile.TemporaryDirectory(dir=self._staging, prefix="checkpoint-") as checkpoint_folder,
            ThreadPoolExecutor(1, "checkpoint") as beside,
        ):
            checkpoint.save(
                Path(checkpoint_folder),
                self._policy,
                self._optimizer,
                run_id=self._run.run_id,
                step=step,
                data_parallel=self._data_parallel,
            )
            state = beside.submit(
                artifacts.publish, self._store, keys.checkpoint(step, epoch), Path(checkpoint_folder)
            )
            save_adapter(Path(adapter_folder), self._policy)
            adapter = artifacts.publish(self._store, keys.policy(step, epoch), Path(adapter_folder))
            canary = Canary(
                token_ids=self._probe,
                logprobs=tuple(self._policy.score(self._probe)),
                base_logprobs=self._base_logprobs,
            )
            return Published(
                policy=PolicyRef(version=step, files=adapter),
                checkpoint=CheckpointRef(step=step, files=state.result()),
                canary=canary,
            )

    def restore(self, commit: StepRecord) -> None:
        """Brings policy and optimizer to the state after `commit`. Raises StoreError, IntegrityError."""
        with tempfile.TemporaryDirectory(dir=self._staging, prefix="checkpoint-") as name:
            folder = artifacts.fetch(self._store, commit.checkpoint.files, Path(name) / "checkpoint")
            checkpoint.load(
                folder,
                self._policy,
                self._optimizer,
                run_id=self._run.run_id,
                step=commit.step,
                data_parallel=self._data_parallel,
            )


def save_adapter(folder: Path, policy: PolicyModel) -> None:
    """A PEFT adapter directory; equal parameters give equal bytes."""
    policy.save_adapter(folder)
    (folder / "README.md").unlink()  # PEFT's model card template says nothing about this adapter
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text())
    # PEFT holds the targets in a set: their order changes from process to process.
    config["target_modules"] = sorted(config["target_modules"])
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def probe_tokens(seed: int, vocab_size: int) -> tuple[int, ...]:
    """The run's canary probe: the same token ids for every version. Any ids do."""
    rng = random.Random(f"canary-{seed}")
    return tuple(rng.randrange(vocab_size) for _ in range(PROBE_TOKENS))
