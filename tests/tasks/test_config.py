"""Wrong task settings are refused with one line that names the field."""

from typing import Any

import pytest

from bucketrl.tasks.base import TaskError
from bucketrl.tasks.config import parse_task_config
from bucketrl.tasks.load import load_task

ARITHMETIC: dict[str, Any] = {"kind": "arithmetic"}
GYM: dict[str, Any] = {"kind": "reasoning_gym", "dataset": "chain_sum", "heldout_size": 5}


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({}, "task.kind is missing"),
        ({"kind": "chess"}, "task.kind 'chess' is unknown"),
        ({"kind": "jsonl", "heldout_size": 1}, "task.path is missing"),
        (ARITHMETIC | {"opreators": "+"}, "task.opreators is unknown"),
        (ARITHMETIC | {"terms": 1}, "task.terms"),
        (ARITHMETIC | {"heldout_size": 0}, "task.heldout_size"),
        (ARITHMETIC | {"seed": -1}, "task.seed"),
        (ARITHMETIC | {"template": "What?"}, "{question}"),
        (ARITHMETIC | {"answer_rule": "guess"}, "task.answer_rule"),
        (ARITHMETIC | {"few_shot": [{"question": "1+1"}]}, "task.few_shot.0.answer is missing"),
        (ARITHMETIC | {"reward": "no_colon"}, "task.reward"),
        (ARITHMETIC | {"reward": "no_such_module:f"}, "task.reward"),
        (ARITHMETIC | {"reward": "math:pi"}, "task.reward"),
        (ARITHMETIC | {"max_operand": 1, "heldout_size": 5}, "task.heldout_size 5"),
        (GYM | {"dataset": "no_such_dataset"}, "task.dataset"),
        (GYM | {"params": {"min_trems": 2}}, "min_trems"),
        (GYM | {"params": {"min_terms": 0}}, "task.params"),
        (GYM | {"params": {"seed": 1}}, "params.seed"),
    ],
)
def test_wrong_settings_name_the_field(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(TaskError) as caught:
        load_task(settings)
    assert field in str(caught.value)
    assert "\n" not in str(caught.value)


def test_tables_of_a_toml_file_are_accepted() -> None:
    config = parse_task_config(GYM | {"few_shot": [{"question": "1+1", "answer": "2"}], "answer_rule": "tag"})
    assert config.few_shot[0].answer == "2"
