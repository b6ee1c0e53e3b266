"""A TOML file becomes a configuration, or one line that says what is wrong with it."""

from pathlib import Path

import pytest
from tests.jobs.worlds import toml

from bucketrl.bucket.errors import UserError
from bucketrl.jobs.config_file import load_config


def write(folder: Path, text: str) -> Path:
    path = folder / "x.toml"
    path.write_text(text)
    return path


def complaint(folder: Path, text: str) -> str:
    """The one line, without the file's name, which it must start with."""
    path = write(folder, text)
    with pytest.raises(UserError) as caught:
        load_config(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message.removeprefix(f"{path}: ")


def test_a_valid_file_loads(tmp_path: Path) -> None:
    """Sections and defaults arrive where they belong."""
    config = load_config(write(tmp_path, toml("tiny-arithmetic")))
    assert (config.name, config.lora.rank, config.algorithm.steps, config.seed) == ("demo", 8, 3, 0)


def test_a_misspelt_key_is_named_with_the_nearest_known_one(tmp_path: Path) -> None:
    assert (
        complaint(tmp_path, toml("m", algorithm="learning_rat = 1.0"))
        == "algorithm.learning_rat: unknown key; did you mean learning_rate?"
    )


def test_a_misspelt_section_is_named_with_the_nearest_known_one(tmp_path: Path) -> None:
    assert complaint(tmp_path, toml("m", algoritm="steps = 1")) == (
        "algoritm: unknown key; did you mean algorithm?"
    )


def test_a_key_like_no_other_is_answered_with_all_known_ones(tmp_path: Path) -> None:
    assert complaint(tmp_path, toml("m", learner="zzz = 1")) == (
        "learner.zzz: unknown key; known: tokens_per_microbatch, activation_checkpointing"
    )


@pytest.mark.parametrize(
    ("section", "lines", "field", "words"),
    [
        ("algorithm", 'learning_rate = "fast"', "algorithm.learning_rate", ("valid number", "'fast'")),
        ("algorithm", "learning_rate = -1", "algorithm.learning_rate", ("greater than 0", "found -1")),
        ("algorithm", "clip_low = 2", "algorithm.clip_low", ("less than 1", "found 2")),
        ("lora", "rank = 7", "lora", ("rank 7", "[1, 8, 16")),
        (
            "lora",
            'target_modules = "q_proj"',
            "lora.target_modules",
            ("'all-linear'", "or", "found 'q_proj'"),
        ),
        ("model", 'id = "m"\ndtype = "float16"', "model.dtype", ("'float32' or 'bfloat16'", "'float16'")),
        ("sampling", "top_p = 0.5", "sampling", ("top_p 0.5", "use top_p = 1.0")),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(
    tmp_path: Path, section: str, lines: str, field: str, words: tuple[str, ...]
) -> None:
    """Field, what was found, what is allowed; nothing of the validator's inner life."""
    message = complaint(tmp_path, toml("m", **{section: lines}))
    assert message.startswith(f"{field}: ")
    for word in words:
        assert word in message
    assert "literal[" not in message


def test_a_missing_section_is_named(tmp_path: Path) -> None:
    assert complaint(tmp_path, 'name = "demo"\n[task]\nkind = "arithmetic"\n') == "model: is missing"


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ('kind = "arithmetics"', ("task.kind", "arithmetics", "reasoning_gym")),
        ('kind = "arithmetic"\nterm = 3', ("task.term", "unknown")),
        ('kind = "arithmetic"\nterms = 1', ("task.terms", "greater than or equal to 2")),
    ],
)
def test_the_task_section_is_checked_too(tmp_path: Path, lines: str, words: tuple[str, ...]) -> None:
    """The bucket does not interpret [task]; the file is refused all the same."""
    message = complaint(tmp_path, toml("m", task=lines))
    for word in words:
        assert word in message


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nope\.toml: there is no such file"):
        load_config(tmp_path / "nope.toml")


def test_what_is_no_toml_is_named_with_its_line(tmp_path: Path) -> None:
    assert complaint(tmp_path, "name = \n").startswith("not TOML: ")


def test_a_folder_in_place_of_a_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        load_config(tmp_path)
