"""The estimate of a learner's memory, and what follows from it."""

import logging
from pathlib import Path
from typing import Literal

import pytest
import torch
from tests.learner.worlds import make_config, save_tiny_model
from transformers import AutoModelForCausalLM

from bucketrl.bucket.errors import UserError
from bucketrl.jobs import memory_check
from bucketrl.learner.activations import GIB, Footprint, checkpoint_blocks, decide, measure
from bucketrl.learner.model import PolicyModel
from bucketrl.learner.packing import Segment

CPU = torch.device("cpu")
FOOTPRINT = Footprint(weights=4 * GIB, optimizer=GIB, activations=20 * GIB, checkpointed=2 * GIB)
"""With the head, 26 GiB if all is kept and 8 with checkpointing."""


def decision(setting: bool | Literal["auto"], gib: int) -> bool:
    return decide(FOOTPRINT, setting, head=GIB, tokens=8192, memory=gib * GIB, where="the GPU")


@pytest.mark.parametrize(
    ("setting", "gib", "checkpoints"),
    [("auto", 26, False), ("auto", 25, True), ("auto", 8, True), (True, 80, True), (False, 26, False)],
)
def test_activations_are_computed_again_where_that_is_wanted_or_needed(
    setting: bool | Literal["auto"], gib: int, checkpoints: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert decision(setting, gib) is checkpoints
    assert caplog.messages == [
        "memory: 4.00 GiB of weights, 1.00 of gradients and optimizer, 1.00 for the head, 20.00 for a micro-batch "
        f"of 8192 tokens (2.00 with activation checkpointing), of the {gib}.00 of the GPU: activation "
        f"checkpointing is {'on' if checkpoints else 'off'}"
    ]


@pytest.mark.parametrize(
    ("setting", "gib", "way_out"),
    [
        ("auto", 7, r"of the 7\.00 of the GPU: lower learner\.tokens_per_microbatch"),
        (True, 7, r"of the 7\.00 of the GPU: lower learner\.tokens_per_microbatch"),
        (False, 25, r"set learner\.activation_checkpointing to true, lower"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_way_out(
    setting: bool | Literal["auto"], gib: int, way_out: str
) -> None:
    with pytest.raises(UserError, match=way_out):
        decision(setting, gib)


def footprint(policy: PolicyModel, measured: int, tokens: int) -> Footprint:
    ids = torch.arange(measured) % policy.vocab_size
    return measure(
        policy._peft,
        lambda: policy._hidden(ids, torch.arange(measured), (Segment(measured),)),
        measured_tokens=measured,
        tokens=tokens,
        hidden_bytes=4 * 64,
    )


def test_a_short_sequence_shows_what_a_long_one_takes(tmp_path: Path) -> None:
    policy = PolicyModel.load(save_tiny_model(tmp_path, max_position_embeddings=1024), make_config(), CPU)
    guess, truth = (footprint(policy, measured, 1024) for measured in (32, 1024))
    assert guess.activations == pytest.approx(truth.activations, rel=0.05)
    assert guess.checkpointed == pytest.approx(truth.checkpointed, rel=0.05)
    # No less than what the linear layers need, as planner/memory_model.py counts it.
    assert truth.activations > 1024 * 4 * 2 * 4 * (64 + 64 + 96)


def test_the_command_expects_what_the_learner_measures(tmp_path: Path) -> None:
    """The difference that checkpointing makes, told from `config.json` and found in the forward pass."""
    folder = save_tiny_model(tmp_path, max_position_embeddings=1024, num_hidden_layers=4)
    found = footprint(PolicyModel.load(folder, make_config(), CPU), 32, 1024)
    expected = {}
    for setting in (False, "auto", True):
        learner = {"tokens_per_microbatch": 1024, "activation_checkpointing": setting}
        config = make_config(learner=learner, algorithm={"groups_per_step": 100})
        expected[setting] = memory_check._learner(config, memory_check.model_shape(folder))
    assert expected["auto"] == expected[True]  # what it cannot do without
    saved = found.activations - found.checkpointed
    assert expected[False] - expected[True] == pytest.approx(saved, rel=0.3)


def test_weights_and_optimizer_are_counted_exactly(model_folder: Path) -> None:
    """Tied embeddings once, the adapter's gradient and moments, nothing of them as activations."""
    policy = PolicyModel.load(model_folder, make_config(model={"dtype": "bfloat16"}), CPU)
    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.bfloat16)
    adapter = sum(parameter.numel() for parameter in policy.parameters.values())
    buffers = sum(each.nbytes for each in base.buffers())
    weights = sum(each.nbytes for each in base.parameters()) + buffers + 4 * adapter
    found = footprint(policy, 32, 32)
    assert found.weights == pytest.approx(weights, rel=0.01)
    assert found.optimizer == 12 * adapter


def test_the_copy_that_undoes_several_updates_is_counted(model_folder: Path) -> None:
    policy = PolicyModel.load(model_folder, make_config(), CPU)
    adapter = sum(parameter.numel() for parameter in policy.parameters.values())
    one, two = (
        measure(
            policy._peft, lambda: None, measured_tokens=1, tokens=1, hidden_bytes=1, updates=updates
        ).optimizer
        for updates in (1, 2)
    )
    assert (one, two) == (12 * adapter, 24 * adapter)


def test_a_checkpointed_block_runs_again_only_for_gradients(model_folder: Path) -> None:
    policy = PolicyModel.load(model_folder, make_config(), CPU)
    runs: list[int] = []
    policy._decoder.layers[0].mlp.register_forward_pre_hook(lambda *_: runs.append(1))
    checkpoint_blocks(policy._decoder)
    places = torch.arange(8)
    hidden = policy._hidden(places, places, (Segment(8),))
    assert len(runs) == 1
    hidden.sum().backward()
    assert len(runs) == 2
    with torch.no_grad():
        policy._hidden(places, places, (Segment(8),))
    assert len(runs) == 3
