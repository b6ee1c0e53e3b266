"""How far the sampler's log-probabilities are from the learner's, on what a worker has drawn."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from bucketrl.bucket.artifacts import fetch
from bucketrl.bucket.keys import TRAJECTORY_PREFIX, parse_trajectory
from bucketrl.bucket.log import LogReader
from bucketrl.bucket.records import RunRecord, StepRecord
from bucketrl.bucket.store import Store
from bucketrl.bucket.trajectories import TrajectoryGroup, decode
from bucketrl.jobs.runs import load_model
from bucketrl.learner import packing
from bucketrl.learner.model import PolicyModel


def mismatch(
    store: Store, run: RunRecord, folder: Path, device: torch.device, *, groups: int
) -> dict[str, float]:
    """Mean and largest |log π - log μ| over the newest `groups` groups, each token under the version that
    sampled it; with the learner's head in float32, and with one whose logits are rounded as vLLM rounds its own.
    """
    log = LogReader(store, run)
    steps = {record.step: record for record in log.refresh() if isinstance(record, StepRecord)}
    drawn = _newest(store, run, max(steps), groups)
    policy = PolicyModel.load(load_model(run, progress=lambda _: None), run.config, device)
    found: dict[str, list[np.ndarray]] = {"": [], "_rounded_head": []}
    for version in sorted({group.trajectories[0].policy_versions[0] for group in drawn}):
        adapter = fetch(store, steps[version].policy.files, folder / f"mismatch-{version}")
        tensors = load_file(adapter / "adapter_model.safetensors")
        with torch.no_grad():
            for name, parameter in policy.parameters.items():
                parameter.copy_(tensors[name])
        of_version = [g for g in drawn if g.trajectories[0].policy_versions[0] == version]
        for batch in packing.pack(packing.sequences(of_version), 8192):
            for name, logprobs in _both_heads(policy, batch).items():
                found[name].append(np.abs(logprobs - batch.behaviour_logprobs))
    figures: dict[str, float] = {"logprob_tokens": sum(map(len, found[""]))}
    for name, parts in found.items():
        values = np.concatenate(parts)
        figures[f"logprob_mean_abs{name}"] = float(f"{values.mean():.3g}")
        figures[f"logprob_max_abs{name}"] = float(f"{values.max():.3g}")
    return figures


def _newest(store: Store, run: RunRecord, newest: int, groups: int) -> list[TrajectoryGroup]:
    """Of one version each."""
    keys = sorted(info.key for info in store.list(TRAJECTORY_PREFIX))[-groups:]
    found = []
    for key in keys:
        parsed = parse_trajectory(key)
        assert parsed is not None
        group_id, attempt = parsed
        found.append(
            decode(
                store.get(key), run_id=run.run_id, group_id=str(group_id), attempt=attempt, max_version=newest
            )
        )
    return [g for g in found if len({v for t in g.trajectories for v in t.policy_versions}) == 1]


@torch.no_grad()
def _both_heads(policy: PolicyModel, batch: packing.MicroBatch) -> dict[str, np.ndarray]:
    """[N] each."""
    exact, _ = policy.logprobs(batch)
    hidden, targets = policy.hidden(batch), torch.from_numpy(batch.targets).to(policy.device)
    rounded: Sequence[torch.Tensor] = [
        torch.log_softmax(
            (part @ policy._head.weight.T).float() / policy.config.sampling.temperature, dim=-1
        ).gather(1, chosen[:, None])[:, 0]
        for part, chosen in zip(hidden.split(512), targets.split(512), strict=True)
    ]
    return {"": exact.cpu().numpy(), "_rounded_head": torch.cat(list(rounded)).cpu().numpy()}
