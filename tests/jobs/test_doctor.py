"""The doctor tells a task that teaches from one that cannot, and says what is wrong."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bucketrl.bucket.config import RunConfig
from bucketrl.jobs.doctor import Sample, judge, probe_task, render, summarise, wilson
from bucketrl.rollout_worker.engine import DroppedCompletion, SampledCompletion, SamplingRequest
from bucketrl.rollout_worker.rewards import RewardFailed
from bucketrl.tasks.base import FinishReason, Prompt, Reward, TaskError
from bucketrl.tasks.load import load_task

TASK: dict[str, Any] = {"kind": "arithmetic", "max_operand": 99, "answer_rule": "last_number"}
CONFIG = RunConfig.model_validate(
    {
        "name": "probe",
        "model": {"id": "tiny-arithmetic"},
        "task": TASK,
        "sampling": {"max_tokens": 8},
        "rollout": {"max_model_len": 32},
    }
)


class CharacterTokenizer:
    """One token for each character; the chat template is the last message."""

    eos_token: str | None = "="
    eos_token_id: int | None = 0
    chat_template: str | None = "content="

    def apply_chat_template(self, conversation: list[dict[str, str]], **kwargs: Any) -> str:
        return conversation[-1]["content"] + "="

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return "".join(chr(token) for token in token_ids if token)


def sum_of(request: SamplingRequest) -> int:
    question = "".join(chr(token) for token in request.prompt_token_ids).rstrip("=")
    return sum(int(term) for term in question.split("+"))


def sampled(text: str, finish_reason: FinishReason = "stop") -> SampledCompletion:
    ids = (*(ord(character) for character in text), 0)
    return SampledCompletion(ids, (-0.1,) * len(ids), (0,) * len(ids), finish_reason)


class Model:
    """Right for even sums; for odd ones right as often as the request's seed is even; else wrong."""

    def __init__(self) -> None:
        self.requests: list[SamplingRequest] = []

    async def generate(self, request: SamplingRequest) -> SampledCompletion:
        self.requests.append(request)
        total = sum_of(request)
        right = total % 2 == 0 or request.seed % 2 == 0
        return sampled(str(total if right else total + 1))


async def probe(
    generate: Any, task: Any = None, *, score: Any = None, prompts: int = 40, seed: int = 0
) -> Any:
    task = task or load_task(TASK)

    async def by_task(prompt: Prompt, completion: str, finish_reason: FinishReason) -> Reward:
        return task.score(prompt, completion, finish_reason)

    engine: Any = SimpleNamespace(generate=generate, stop_token_ids=(0,))
    rewards: Any = SimpleNamespace(score=score or by_task)
    return await probe_task(
        engine, rewards, CharacterTokenizer(), task, CONFIG, prompts=prompts, group_size=8, seed=seed
    )


async def test_half_of_the_groups_mixed_is_a_signal() -> None:
    found = await probe(Model().generate)
    assert found.verdict == "signal"
    assert found.groups == 40
    assert found.completions == 320
    assert 0.3 < found.mixed < 0.7
    assert found.mixed_low < found.mixed < found.mixed_high
    assert found.best == round(40 * (1 - found.mixed))
    assert found.worst == found.dropped == 0
    assert found.answered == 1.0
    assert 0.6 < found.mean_reward < 0.9


async def test_every_request_has_its_own_seed_and_id_and_the_same_again_next_time() -> None:
    first, second = Model(), Model()
    await probe(first.generate)
    await probe(second.generate)
    assert len({request.seed for request in first.requests}) == 320
    assert len({request.request_id for request in first.requests}) == 320
    assert set(first.requests) == set(second.requests)
    assert {request.temperature for request in first.requests} == {1.0}


async def test_a_model_that_knows_nothing_is_told_from_one_that_knows_all() -> None:
    async def wrong(request: SamplingRequest) -> SampledCompletion:
        return sampled("-1")

    async def right(request: SamplingRequest) -> SampledCompletion:
        return sampled(f"is {sum_of(request)}")

    hard, easy = await probe(wrong), await probe(right)
    assert (hard.verdict, hard.worst, hard.best) == ("none", 40, 0)
    assert "too hard" in hard.advice
    assert (easy.verdict, easy.worst, easy.best) == ("none", 0, 40)
    assert "too easy" in easy.advice


async def test_answers_that_are_not_found_and_completions_cut_off_are_named() -> None:
    async def wordy(request: SamplingRequest) -> SampledCompletion:
        return sampled("many")

    async def endless(request: SamplingRequest) -> SampledCompletion:
        return sampled(str(sum_of(request)), "length")

    lost, cut = await probe(wordy), await probe(endless)
    assert lost.answered == 0.0
    assert "answer_rule" in lost.advice
    assert cut.truncated == 1.0
    assert "max_tokens" in cut.advice


async def test_dropped_completions_are_counted_and_not_scored() -> None:
    model = Model()
    task = load_task(TASK)

    async def generate(request: SamplingRequest) -> SampledCompletion:
        if request.request_id.endswith("-0"):
            raise DroppedCompletion("nothing sampled")
        return await model.generate(request)

    async def score(prompt: Prompt, completion: str, finish_reason: FinishReason) -> Reward:
        raise RewardFailed("reward took more than 1 s")

    found = await probe(generate, task, prompts=10)
    assert (found.completions, found.dropped) == (70, 10)
    with pytest.raises(TaskError, match="no completion could be scored"):
        await probe(generate, task, score=score, prompts=10)


async def test_prompts_that_are_too_long_are_counted() -> None:
    with pytest.raises(TaskError, match="max_model_len"):
        await probe(Model().generate, load_task(TASK | {"terms": 8, "max_operand": 10**9}), prompts=3)


async def test_the_report_shows_numbers_examples_and_the_verdict() -> None:
    text = render(await probe(Model().generate))
    assert "40 groups, 320 completions, 0 dropped" in text
    assert "answer '" in text
    assert text.splitlines()[-1].startswith("signal: signal;")


def sample(reward: float, *, question: str = "q", tokens: int = 3) -> Sample:
    return Sample(question, "c", None, Reward(reward), tokens, False)


def test_graded_rewards_count_as_mixed_when_they_differ() -> None:
    found = summarise([[sample(0.5), sample(0.25)], [sample(0.5), sample(0.5)], [sample(0), sample(0)]])
    assert found.mixed == pytest.approx(1 / 3)
    assert (found.best, found.worst) == (1, 1)
    assert found.answered is None
    assert found.mean_tokens == 3.0


def test_a_group_with_one_completion_left_is_not_a_group() -> None:
    found = summarise([[sample(1), None], [sample(0), sample(1)]])
    assert (found.groups, found.completions, found.dropped) == (1, 2, 2)


@pytest.mark.parametrize(
    ("mixed", "verdict"),
    [(0.0, "none"), (0.04, "none"), (0.1, "weak"), (0.2, "signal"), (0.8, "signal"), (0.9, "signal")],
)
def test_the_verdict_follows_the_share_of_mixed_groups(mixed: float, verdict: str) -> None:
    assert judge(mixed, best=1, worst=2, truncated=0.0, answered=1.0)[0] == verdict


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_the_interval_contains_the_share_and_lies_in_the_unit_interval(counts: tuple[int, int]) -> None:
    low, high = wilson(*counts)
    assert 0.0 <= low <= counts[0] / counts[1] + 1e-12
    assert counts[0] / counts[1] - 1e-12 <= high <= 1.0


def test_the_interval_is_wilsons() -> None:
    """Published example: 81 of 263, 95 %: 0.2553 to 0.3662 (Newcombe, 1998, method 3)."""
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
