"""What a run asks of a Hugging Face bucket: five minutes of 64 workers, in virtual time."""

import re
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
from tests.support.budget import COMMITS_KEPT, WORKERS, five_minutes

from bucketrl.bucket.counting import HF_LIMIT
from bucketrl.bucket.stores.hf import PAGE


@pytest.mark.slow
@pytest.mark.parametrize("groups_per_step", [16, 64])
def test_five_minutes_of_64_workers_at_a_step_a_minute_stay_inside_the_limit(
    groups_per_step: int, tmp_path: Path
) -> None:
    # In a process of its own, which takes along what the killed workers leave behind.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        spent, steps = pool.submit(five_minutes, tmp_path, groups_per_step).result()
    for (role, kind), number in sorted(spent.items()):
        print(f"{role:8} {kind:8} {number:5}")
    print(f"{groups_per_step} groups a step, {steps} steps: {spent.total()} API requests")
    assert steps == 5
    assert spent.total() <= HF_LIMIT
    assert spent.total() == pytest.approx(_formula(steps, groups_per_step), rel=0.1)
    stated = int(_stated(groups_per_step).replace(",", ""))
    assert 0.9 * stated <= spent.total() <= stated, "bucket_layout.md section 12 says otherwise"


def _formula(steps: int, groups_per_step: int) -> int:
    """That of bucket_layout.md section 12."""
    adapter, checkpoint = 2, 1
    pages = 2 * (COMMITS_KEPT + 4) * groups_per_step // PAGE + 1  # a folder for each file
    return (
        2 * WORKERS * steps
        + 2 * steps * groups_per_step
        + steps * (6 + 2 * adapter + 2 * checkpoint)
        + (steps + 5) * pages
        + 4 * steps
        + 35
    )


def _stated(groups_per_step: int) -> str:
    text = (Path(__file__).parents[2] / "bucket_layout.md").read_text(encoding="utf-8")
    [number] = re.findall(rf"^\| {WORKERS} \| 5 \| {groups_per_step} \| ([\d,]+) \|$", text, re.MULTILINE)
    return str(number)
