"""Completions of several requests: turns that an environment answers, chunks that go on with the newest version."""

import asyncio
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bucketrl.bucket.completions import Completion, check_completions
from bucketrl.bucket.errors import UserError
from bucketrl.rollout_worker.continuation import fresh
from bucketrl.rollout_worker.counters import Counters
from bucketrl.rollout_worker.drawing import CompletionSampler
from bucketrl.rollout_worker.engine import DroppedCompletion, SampledCompletion, SamplingRequest
from bucketrl.rollout_worker.episode import Episode, policy_turns
from bucketrl.rollout_worker.prompts import _MARK, Prompts
from bucketrl.rollout_worker.rewards import RewardFailed
from bucketrl.tasks.base import FinishReason, Message, Prompt, Reward, Split, TaskError

from .fake_engine import logprob_of
from .fake_run import make_run
from .fakes import FakeRewards, FakeTask, FakeTokenizer

MAX_TOKENS = 24
STOP = 0


def digest(*what: Any) -> int:
    return hashlib.sha256(repr(what).encode()).digest()[0]


class Questioner(FakeTask):
    """Asks up to twice more, depending on what the policy says."""

    tools: tuple[dict[str, Any], ...] = ()

    def respond(self, prompt: Prompt, said: tuple[Message, ...]) -> tuple[Message, ...]:
        turns = [message["content"] for message in said[::2]]
        assert all(message["role"] == "assistant" for message in said[::2])
        assert list(said[1::2]) == [
            {"role": "user", "content": question(said[:n])} for n in range(1, len(said), 2)
        ]
        over = len(turns) > 2 or digest(turns) % 4 == 0
        return () if over else ({"role": "user", "content": question(said)},)

    def score_episode(self, prompt: Prompt, said: tuple[Message, ...], finish_reason: FinishReason) -> Reward:
        assert [message["role"] for message in said] == ["assistant", "user"] * (len(said) // 2) + [
            "assistant"
        ]
        return Reward(float(len(said)), {"finished": float(finish_reason == "stop")})


def question(said: tuple[Message, ...]) -> str:
    return f"{digest([message['content'] for message in said]) % 100}?"


class Tokenizer(FakeTokenizer):
    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        kept = [token for token in token_ids if token != STOP]
        return super().decode(kept, skip_special_tokens=skip_special_tokens)


class Rewards(FakeRewards):
    def __init__(self, task: Questioner) -> None:
        super().__init__(task)
        self._asked = task

    async def respond(self, prompt: Prompt, said: tuple[Message, ...]) -> tuple[Message, ...]:
        await asyncio.sleep(0)
        return self._asked.respond(prompt, said)

    async def score_episode(
        self, prompt: Prompt, said: tuple[Message, ...], finish_reason: FinishReason
    ) -> Reward:
        return self._asked.score_episode(prompt, said, finish_reason)


@dataclass
class Policy:
    """An engine whose token depends on its context alone, so that there is one right completion. `use` gives
    another version for each request."""

    first_version: int = 0
    budget: int = 10**6
    """Tokens until it is aborted."""
    stop_token_ids: tuple[int, ...] = (STOP,)
    requests: list[SamplingRequest] = field(default_factory=list)
    sampler: CompletionSampler | None = None

    @contextmanager
    def use(self) -> Iterator[int]:
        yield self.first_version + len(self.requests)

    async def generate(self, request: SamplingRequest) -> SampledCompletion:
        self.requests.append(request)
        drawn: list[int] = []
        while len(drawn) < request.max_tokens and drawn[-1:] != [STOP]:
            if self.budget == 0:
                if self.sampler is not None:
                    await self.sampler.cut()
                break
            self.budget -= 1
            byte = digest(request.context + tuple(drawn))
            drawn.append(STOP if byte % 5 == 0 else 100 + byte % 26)
        reason: Any = (
            "stop" if drawn[-1:] == [STOP] else "length" if len(drawn) == request.max_tokens else "abort"
        )
        version = request.policy_version
        return SampledCompletion(
            tuple(drawn),
            tuple(logprob_of(token, version) for token in drawn),
            (version,) * len(drawn),
            reason,
        )

    async def abort(self, request_id: str) -> None:
        await asyncio.sleep(0)


async def draw(
    policy: Policy, task: FakeTask, index: int, chunk: int, so_far: Completion | None = None
) -> tuple[Completion, Reward | None]:
    run = make_run(
        sampling={"group_size": 2, "max_tokens": MAX_TOKENS},
        rollout={"max_model_len": 64, "lease_seconds": 5.0},
    )
    prompts = Prompts(task, Tokenizer(), run.config)
    prompt = prompts.get("train", index)
    rewards = Rewards(task) if isinstance(task, Questioner) else FakeRewards(task)
    counters = Counters()
    sampler = CompletionSampler(
        policy,  # type: ignore[arg-type]
        policy.use,
        prompts,
        rewards,  # type: ignore[arg-type]
        counters,
        max_tokens=MAX_TOKENS,
        chunk_tokens=chunk,
        temperature=1.0,
    )
    if policy.budget < 10**6:
        policy.sampler = sampler
    begun = so_far or fresh(prompt.token_ids, 0, 1, "")
    completion, episode = await sampler.draw("name", prompt, begun, lambda drawn: drawn)
    assert counters.running_requests == 0
    assert counters.completions == bool(completion.finish_reason)
    return completion, await episode.reward(completion) if completion.finish_reason else None


@settings(max_examples=150)
@given(
    index=st.integers(0, 40),
    chunks=st.tuples(*[st.integers(0, 6)] * 3),
    budgets=st.tuples(*[st.integers(0, 8)] * 2),
    turns=st.booleans(),
)
def test_however_it_is_drawn_the_completion_is_the_same_and_each_token_stamped_right(
    index: int, chunks: tuple[int, ...], budgets: tuple[int, ...], turns: bool
) -> None:
    task = Questioner() if turns else FakeTask()
    wanted, wanted_reward = asyncio.run(draw(Policy(), task, index, 0))
    so_far, reward = None, None
    for part, (chunk, budget) in enumerate(zip(chunks, (*budgets, 10**6), strict=True)):
        policy = Policy(first_version=100 * part, budget=budget)
        so_far, reward = asyncio.run(draw(policy, task, index, chunk, so_far))
        assert all(request.max_tokens <= (chunk or MAX_TOKENS) for request in policy.requests)
        if so_far.finish_reason:
            break
    assert so_far is not None
    assert so_far.completion_token_ids == wanted.completion_token_ids
    assert so_far.finish_reason == wanted.finish_reason
    assert so_far.loss_mask == wanted.loss_mask
    assert reward == wanted_reward
    assert list(so_far.policy_versions) == sorted(so_far.policy_versions)
    for token, version, logprob, sampled in zip(
        so_far.completion_token_ids,
        so_far.policy_versions,
        so_far.behaviour_logprobs,
        so_far.loss_mask,
        strict=True,
    ):
        assert logprob == (logprob_of(token, version) if sampled else 0.0)
    check_completions("0000-00000000", [so_far], lambda one: None)


def test_the_environments_tokens_are_masked_and_the_policys_kept() -> None:
    lengths = set()
    for index in range(40):
        completion, reward = asyncio.run(draw(Policy(), Questioner(), index, 0))
        assert reward is not None
        turns = policy_turns(completion)
        lengths.add(len(turns))
        assert reward.total == 2 * len(turns) - 1
        assert all(turn[-1] == STOP and STOP not in turn[:-1] for turn in turns[:-1])
        masked = "".join(
            map(
                chr,
                (
                    token
                    for token, sampled in zip(
                        completion.completion_token_ids, completion.loss_mask, strict=True
                    )
                    if not sampled
                ),
            )
        )
        assert masked.count("?") == len(turns) - 1
        assert len(completion.completion_token_ids) <= MAX_TOKENS
    assert lengths == {1, 2, 3}


def test_an_environment_that_leaves_no_room_ends_the_completion_for_length() -> None:
    reasons = {}
    for index in range(60):
        completion, _ = asyncio.run(draw(Policy(), Questioner(), index, 0))
        if completion.completion_token_ids[-1] == STOP:
            reasons.setdefault(completion.finish_reason, index)
        assert completion.loss_mask[-1]
    assert set(reasons) == {"stop", "length"}


def test_each_request_has_a_seed_of_its_own() -> None:
    policy = Policy()
    completion, _ = asyncio.run(draw(policy, FakeTask(), 1, 2))
    assert [request.seed for request in policy.requests] == list(
        range(0, len(completion.completion_token_ids), 2)
    )


async def test_an_environment_that_fails_costs_its_completion_only() -> None:
    class Broken(Questioner):
        def respond(self, prompt: Prompt, said: tuple[Message, ...]) -> tuple[Message, ...]:
            raise RewardFailed("environment raised ValueError")

    with pytest.raises(RewardFailed, match="environment raised"):
        await draw(Policy(), Broken(), 9, 0)


@pytest.mark.parametrize("content", ["\ud800", None])
async def test_an_answer_that_cannot_be_templated_costs_its_completion_only(content: Any) -> None:
    class Odd(Questioner):
        def respond(self, prompt: Prompt, said: tuple[Message, ...]) -> tuple[Message, ...]:
            return ({"role": "user", "content": content},)

    class Strict(Tokenizer):
        def apply_chat_template(self, conversation: list[dict[str, str]], **kwargs: Any) -> str:
            return "".join("<" + message["content"] + ">" for message in conversation)

    prompts = Prompts(Odd(), Strict(), make_run().config)
    prompt = prompts.get("train", 0)
    episode = Episode(prompt, prompts, Rewards(Odd()), (STOP,))  # type: ignore[arg-type]
    said = replace(
        fresh(prompt.token_ids, 0, 1, ""), completion_token_ids=(100, STOP), behaviour_logprobs=(-1.0, -1.0),
        policy_versions=(0, 0), loss_mask=(True, True),
    )  # fmt: skip
    with pytest.raises(RewardFailed, match="answer does not fit"):
        await episode.answered(said, 24)


def test_a_prompt_that_is_not_unicode_text_is_named() -> None:
    class Odd(FakeTask):
        def prompt(self, split: Split, index: int) -> Prompt:
            return Prompt(index, ({"role": "user", "content": "\ud83d"},), None)

    with pytest.raises(TaskError, match="train prompt 3 is not Unicode text"):
        Prompts(Odd(), Tokenizer(), make_run().config).get("train", 3)


def test_an_answer_may_contain_any_text() -> None:
    prompts = Prompts(Questioner(), Tokenizer(), make_run().config)
    for text in ("", "x", _MARK, f"sha256: {_MARK}"):
        tokens = prompts.between_turns(({"role": "user", "content": text},))
        assert "".join(map(chr, tokens)) == f"<{text}>"


async def test_an_engine_that_aborts_by_itself_costs_the_completion_and_hangs_nobody() -> None:
    policy = Policy()

    async def aborted(request: SamplingRequest) -> SampledCompletion:
        return SampledCompletion((), (), (), "abort")

    policy.generate = aborted  # type: ignore[method-assign]
    with pytest.raises(DroppedCompletion, match="aborted by the engine"):
        await draw(policy, FakeTask(), 0, 0)


def test_a_template_that_does_not_end_turns_with_the_eos_token_is_refused_at_start() -> None:
    tokenizer = Tokenizer()
    tokenizer.eos_token = "</s>"
    run = make_run()
    with pytest.raises(UserError, match="chat template does not end the assistant's turn with the eos token"):
        Prompts(Questioner(), tokenizer, run.config)
    Prompts(FakeTask(), tokenizer, run.config)
