"""What goes wrong between adapters and engines elsewhere, and what happens here: docs/engine_faults.md is the list.
test_vllm_engine.py inherits `AdapterFaults` for vLLM."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.jobs.worlds import toml

from bucketrl.bucket.errors import IntegrityError, UserError
from bucketrl.jobs.config_file import load_config
from bucketrl.rollout_worker.adapter_config import check_adapter_config
from bucketrl.rollout_worker.engine import Engine

from .conftest import World
from .engine_contract import request
from .fake_engine import tokens_of_seed
from .fake_run import adapter_config, make_run
from .fakes import until, uploaded_groups
from .learned import VERSIONS, Learned, make_config
from .tiny_model import ALPHA, RANK

TOLERANCE = 1e-3
PROMPT = tuple(5 + 11 * n % 90 for n in range(150))
WEIGHTS = "adapter_model.safetensors"


async def check_served(engine: Engine, learned: Learned, version: int, as_learned: int) -> None:
    """What `version` samples has the log-probabilities of the learner's `as_learned`, and no other's."""
    drawn = await engine.generate(request(version, seed=version, prompt=PROMPT))
    for learnt, policy in learned.policies[1.0].items():
        expected = policy.score(PROMPT + drawn.token_ids)[len(PROMPT) - 1 :]
        difference = max(abs(a - b) for a, b in zip(expected, drawn.logprobs, strict=True))
        assert (difference <= TOLERANCE) == (learnt == as_learned), f"{learnt}: {difference:.2g}"


def changed(source: Path, folder: Path, **config: Any) -> Path:
    """A copy of an adapter with other settings in its adapter_config.json."""
    shutil.copytree(source, folder)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


def with_weights(source: Path, folder: Path, change: Any) -> Path:
    """A copy of an adapter whose matrices went through `change(name, matrix)`."""
    shutil.copytree(source, folder)
    weights = {name: change(name, matrix) for name, matrix in load_file(folder / WEIGHTS).items()}
    save_file(weights, folder / WEIGHTS)
    return folder


def damaged(source: Path, folder: Path, damage: str) -> Path:
    shutil.copytree(source, folder)
    if damage == "truncated":
        (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-100])
    else:
        (folder / damage).unlink()
    return folder


class AdapterFaults:
    """Needs the module fixtures `engine` and `learned`."""

    async def test_weights_that_are_not_finite_never_reach_the_cache(
        self, engine: Engine, learned: Learned, tmp_path: Path
    ) -> None:
        """What they left there would spoil other versions' completions."""

        def poisoned(name: str, matrix: torch.Tensor) -> torch.Tensor:
            return matrix * float("nan") if "layers.1" in name and "lora_B" in name else matrix

        folder = with_weights(learned.adapters[11], tmp_path / "nan", poisoned)
        with pytest.raises(IntegrityError, match=r"version 21: .*layers\.1.*lora_B.* not finite"):
            await engine.add_adapter(21, folder)
        with pytest.raises(KeyError):
            await engine.generate(request(21, seed=0))
        await check_served(engine, learned, 11, 11)

    @pytest.mark.parametrize("damage", ["truncated", WEIGHTS, "adapter_config.json"])
    async def test_files_that_cannot_be_loaded_are_refused_and_the_others_stay(
        self, engine: Engine, learned: Learned, tmp_path: Path, damage: str
    ) -> None:
        """The digests would find them as well; the engine must survive what it is given. Matrices of a wrong
        width vLLM takes without a word: those are the canary's."""
        folder = damaged(learned.adapters[11], tmp_path / "damaged", damage)
        with pytest.raises(IntegrityError, match="version 22"):
            await engine.add_adapter(22, folder)
        with pytest.raises(KeyError):
            await engine.generate(request(22, seed=0))
        await check_served(engine, learned, 12, 12)
        await engine.add_adapter(22, learned.adapters[13])
        await check_served(engine, learned, 22, 13)
        await engine.remove_adapter(22)

    async def test_a_loaded_version_outlives_its_files(
        self, engine: Engine, learned: Learned, tmp_path: Path
    ) -> None:
        """Deleted, not overwritten: vLLM's copy in host memory may be the mapped file itself."""
        folder = changed(learned.adapters[11], tmp_path / "copy")
        await engine.add_adapter(23, folder)
        shutil.rmtree(folder)
        await check_served(engine, learned, 23, 11)
        await engine.remove_adapter(23)

    async def test_versions_beyond_the_slots_are_all_served(self, engine: Engine, learned: Learned) -> None:
        """Nine at once for three slots: they wait and are loaded anew, and none is refused or mistaken."""
        more = {31 + n: VERSIONS[n % 3] for n in range(6)}
        for version, source in more.items():
            await engine.add_adapter(version, learned.adapters[source])
        served = {version: version for version in VERSIONS} | more
        for _ in range(2):
            await asyncio.gather(*(check_served(engine, learned, *pair) for pair in served.items()))
        for version in more:
            await engine.remove_adapter(version)
        await check_served(engine, learned, 11, 11)

    async def test_aborts_around_a_change_of_versions_disturb_nobody(
        self, engine: Engine, learned: Learned
    ) -> None:
        reasons = set()
        for turn in range(4):
            asked = [request(11, seed=n, max_tokens=300, temperature=0.0) for n in range(8)]
            running = [asyncio.create_task(engine.generate(one)) for one in asked]
            adding = asyncio.create_task(engine.add_adapter(40 + turn, learned.adapters[12]))
            await asyncio.sleep(0.02 * turn)
            await asyncio.gather(adding, *(engine.abort(one.request_id) for one in asked))
            ended = await asyncio.wait_for(asyncio.gather(*running), 20)
            reasons |= {one.finish_reason for one in ended}
            await check_served(engine, learned, 40 + turn, 12)
            await engine.remove_adapter(40 + turn)
        assert "abort" in reasons


@pytest.mark.asyncio(loop_scope="module")
class TestTransformersFaults(AdapterFaults):
    async def test_what_the_learner_writes_is_what_the_worker_wants(self, learned: Learned) -> None:
        """Rank, alpha, base model and targets survive the way through PEFT's files."""
        for folder in learned.adapters.values():
            check_adapter_config(folder, make_config())
            written = json.loads((folder / "adapter_config.json").read_text())
            assert (written["r"], written["lora_alpha"]) == (RANK, ALPHA)
            assert all(matrix.abs().max() > 0 for matrix in load_file(folder / WEIGHTS).values())


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("use_dora = true", ("use_dora", "DoRA")),
        ('bias = "all"', ("bias", "biases")),
        ('modules_to_save = ["lm_head"]', ("modules_to_save", "trained whole")),
        ("use_rslora = true", ("use_rslora", "alpha by sqrt(rank)")),
        ("rank_pattern = { q_proj = 4 }", ("rank_pattern", "same rank")),
        ("lora_dropout = 0.1", ("lora_dropout", "policy that was sampled from")),
        ("rank = 12", ("rank 12", "[1, 8, 16")),
        ("rank = 1024", ("rank 1024", "512]")),
        ("alpha = 0", ("lora.alpha", "greater than 0")),
        ("alpha = inf", ("lora.alpha", "finite")),
        ("alpha = nan", ("lora.alpha",)),
        ("target_modules = []", ("target_modules is empty",)),
        ('target_modules = ["q_proj", "lm_head"]', ("lm_head", "cannot be served")),
        ('target_modules = ["c_attn", "wte"]', ("wte", "cannot be served")),
        ('target_modules = ["model.embed_tokens"]', ("model.embed_tokens", "cannot be served")),
    ],
)
def test_lora_settings_that_cannot_be_served_are_refused_in_the_configuration(
    tmp_path: Path, lines: str, words: tuple[str, ...]
) -> None:
    """By name and with the reason, before a bucket, a model or a machine is touched. Targets that the model
    lacks: tests/jobs/test_wrong_input.py."""
    path = tmp_path / "x.toml"
    path.write_text(toml("m", lora=lines))
    with pytest.raises(UserError) as caught:
        load_config(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: lora")
    assert "unknown key" not in message
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("init_lora_weights", "pissa"),
        ("alora_invocation_tokens", [1, 2]),
        ("use_bdlora", {"blocks": 2}),
        ("target_parameters", ["experts.down_proj"]),
        ("lora_bias", True),
        ("lora_alpha", None),
    ],
)
def test_an_adapter_of_another_kind_is_refused_before_the_engine_sees_it(
    tmp_path: Path, field: str, value: Any
) -> None:
    run = make_run()
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter_config(run, **{field: value})))
    with pytest.raises(IntegrityError, match=field):
        check_adapter_config(tmp_path, run.config)


async def test_token_ids_are_stored_as_drawn_and_never_encoded_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokenizer here maps many tokens to one letter: no text leads back to the tokens."""
    encoded = []
    encode = world.tokenizer.encode

    def recorded(text: str, *, add_special_tokens: bool) -> list[int]:
        encoded.append(text)
        return encode(text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(world.tokenizer, "encode", recorded)
    world.proxy.limit = 3
    async with world.working():
        await until(lambda: len(world.proxy.completed) == 3)
    groups = uploaded_groups(world.store, world.run, max_version=0)
    assert sorted(encoded) == sorted(group.prompt_text for group in groups)
    asked = {one.seed: one for one in world.engine.requests}
    for group in groups:
        for t in group.trajectories:
            assert t.completion_token_ids == tokens_of_seed(asked[t.seed])
            assert t.completion_text == world.tokenizer.decode(
                list(t.completion_token_ids), skip_special_tokens=True
            )
            assert encode(t.completion_text, add_special_tokens=False) != list(t.completion_token_ids)
