"""What every engine must do, inherited by the test of each one. Compared with transformers and PEFT alone."""

import asyncio
import itertools
import math
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from bucketrl.rollout_worker.engine import DroppedCompletion, Engine, SampledCompletion, SamplingRequest
from bucketrl.rollout_worker.engines.settings import EngineSettings

from .tiny_model import END_OF_TURN, EOS, RANK, TARGETS, ReferencePolicy, save_adapter, save_model

TOLERANCE = 1e-3
PROMPT = (10, 20, 30, 40, 50)
_ids = itertools.count()


@dataclass(frozen=True)
class Setting:
    """A model folder, three adapter folders and the policies that they define."""

    model: Path
    adapters: dict[int, Path]
    base: ReferencePolicy
    policies: dict[int, ReferencePolicy]


def make_setting(folder: Path) -> Setting:
    model = save_model(folder / "model")
    adapters = {version: save_adapter(model, folder / f"adapter{version}", version) for version in (1, 2, 3)}
    return Setting(
        model,
        adapters,
        ReferencePolicy(model, None),
        {version: ReferencePolicy(model, path) for version, path in adapters.items()},
    )


def make_settings(model: Path) -> EngineSettings:
    return EngineSettings(
        model_path=model,
        dtype="float32",
        max_model_len=512,
        lora_rank=RANK,
        lora_targets=TARGETS,
        adapter_slots=3,
        max_requests=64,
        stop_token_ids=(EOS, END_OF_TURN),
        seed=0,
        kv_cache_bytes=64 << 20,
    )


def request(
    version: int,
    seed: int,
    *,
    prompt: tuple[int, ...] = PROMPT,
    max_tokens: int = 24,
    temperature: float = 1.0,
    prior: tuple[int, ...] = (),
) -> SamplingRequest:
    return SamplingRequest(f"test-{next(_ids)}", prompt, max_tokens, temperature, seed, version, prior)


def mismatch(
    policy: ReferencePolicy, prompt: tuple[int, ...], drawn: SampledCompletion, temperature: float
) -> float:
    """Largest difference between the engine's logprobs and the reference's."""
    expected = policy(prompt + drawn.token_ids, temperature).logprobs[len(prompt) - 1 :]
    return max((abs(a - b) for a, b in zip(expected, drawn.logprobs, strict=True)), default=0.0)


async def long_request(engine: Engine, setting: Setting, version: int, n: int) -> None:
    """400 tokens at most, most of them reached: greedy completions run in circles. Checks them."""
    prompt = (*PROMPT, 3 + n)
    drawn = await engine.generate(request(version, seed=n, prompt=prompt, max_tokens=400, temperature=0.0))
    assert drawn.policy_versions == (version,) * len(drawn.token_ids)
    assert mismatch(setting.policies[version], prompt, drawn, 1.0) < TOLERANCE


class EngineContract:
    """Needs the module fixtures `engine` (versions 1 and 2 added) and `setting`."""

    @pytest.mark.parametrize("temperature", [1.0, 0.7])
    async def test_logprobs_are_those_of_the_policy_that_sampled(
        self, engine: Engine, setting: Setting, temperature: float
    ) -> None:
        """For a batch of both versions and of prompts of different lengths, temperature applied."""
        requests = [
            request(1 + n % 2, seed=n, prompt=tuple(range(3, 6 + n)), temperature=temperature)
            for n in range(16)
        ]
        drawn = await asyncio.gather(*(engine.generate(r) for r in requests))
        for asked, got in zip(requests, drawn, strict=True):
            own, other = asked.policy_version, 3 - asked.policy_version
            assert got.policy_versions == (own,) * len(got.token_ids)
            assert mismatch(setting.policies[own], asked.prompt_token_ids, got, temperature) < TOLERANCE
            if len(got.token_ids) > 4:
                assert (
                    mismatch(setting.policies[other], asked.prompt_token_ids, got, temperature)
                    > 10 * TOLERANCE
                )

    async def test_a_request_alone_gets_the_same_logprobs_as_in_a_batch(
        self, engine: Engine, setting: Setting
    ) -> None:
        got = await engine.generate(request(2, seed=5))
        assert mismatch(setting.policies[2], PROMPT, got, 1.0) < TOLERANCE

    async def test_tokens_are_drawn_from_the_distribution_that_is_reported(
        self, engine: Engine, setting: Setting
    ) -> None:
        """The mean of -log p(token) - entropy is 0 for exact sampling, whatever the policy."""
        drawn = await asyncio.gather(*(engine.generate(request(1, seed=1000 + n)) for n in range(64)))
        surprises = []
        for got in drawn:
            reference = setting.policies[1](PROMPT + got.token_ids)
            entropies = reference.entropies[len(PROMPT) - 1 :]
            surprises += [-p - h for p, h in zip(got.logprobs, entropies, strict=True)]
        mean = sum(surprises) / len(surprises)
        deviation = math.sqrt(sum((s - mean) ** 2 for s in surprises) / len(surprises))
        assert abs(mean) < 4.5 * deviation / math.sqrt(len(surprises))

    async def test_sampling_defaults_of_the_model_card_do_not_apply(self, engine: Engine) -> None:
        """generation_config.json says top_k 1, temperature 0.1, repetition_penalty 2. That none of it moves the
        distribution is what the comparisons with the reference say; this is what top_k alone would do."""
        drawn = await asyncio.gather(*(engine.generate(request(1, seed=n, max_tokens=1)) for n in range(32)))
        assert len({got.token_ids[0] for got in drawn}) > 2

    async def test_the_end_token_is_part_of_the_completion(self, engine: Engine) -> None:
        """Both end tokens of the model stop; nothing follows them; without one the reason is `length`."""
        drawn = await asyncio.gather(
            *(engine.generate(request(1, seed=n, max_tokens=64, temperature=2.0)) for n in range(64))
        )
        ends = {EOS, END_OF_TURN}
        for got in drawn:
            assert not ends & set(got.token_ids[:-1])
            assert (got.token_ids[-1] in ends) == (got.finish_reason == "stop")
            if got.finish_reason == "length":
                assert len(got.token_ids) == 64
        assert {got.token_ids[-1] for got in drawn if got.finish_reason == "stop"} == ends

    async def test_more_prompt_tokens_than_one_step_computes(self, engine: Engine, setting: Setting) -> None:
        """Long seeded prompts that arrive at once: whatever the engine splits, nothing fails or changes."""
        prompts = [tuple(1 + (7 * i + 13 * j) % 60 for j in range(250)) for i in range(24)]
        drawn = await asyncio.gather(
            *(engine.generate(request(1, i, prompt=p, max_tokens=4)) for i, p in enumerate(prompts))
        )
        for prompt, completion in zip(prompts, drawn, strict=True):
            assert mismatch(setting.policies[1], prompt, completion, 1.0) <= TOLERANCE

    async def test_the_seed_decides_the_completion(self, engine: Engine) -> None:
        first, same, other = [await engine.generate(request(1, seed=seed)) for seed in (7, 7, 8)]
        assert first.token_ids == same.token_ids
        assert first.token_ids != other.token_ids

    async def test_temperature_zero_takes_the_most_likely_tokens(self, engine: Engine) -> None:
        drawn = [await engine.generate(request(1, seed=seed, temperature=0.0)) for seed in (1, 2)]
        assert drawn[0].token_ids == drawn[1].token_ids

    async def test_an_unknown_version_is_refused(self, engine: Engine) -> None:
        with pytest.raises(KeyError):
            await engine.generate(request(99, seed=0))
        with pytest.raises(KeyError):
            await engine.score(PROMPT, 99)

    async def test_scores_are_those_of_the_base_and_of_each_version(
        self, engine: Engine, setting: Setting
    ) -> None:
        tokens = tuple(range(5, 29))
        for version in (None, 1, 2, None):
            policy = setting.base if version is None else setting.policies[version]
            got = await engine.score(tokens, version)
            expected = policy(tokens).logprobs
            assert max(abs(a - b) for a, b in zip(got, expected, strict=True)) < TOLERANCE

    async def test_scores_are_right_while_requests_run(self, engine: Engine, setting: Setting) -> None:
        """A canary is scored next to running requests of other versions."""
        tokens = tuple(range(5, 29))
        running = [asyncio.create_task(long_request(engine, setting, 1 + n % 2, n)) for n in range(16)]
        await asyncio.sleep(0.1)
        for version in (2, None, 1):
            policy = setting.base if version is None else setting.policies[version]
            got = await engine.score(tokens, version)
            assert got == pytest.approx(policy(tokens).logprobs, abs=TOLERANCE)
        assert not all(task.done() for task in running)
        await asyncio.gather(*running)

    async def test_a_version_added_under_way_neither_waits_nor_disturbs(
        self, engine: Engine, setting: Setting
    ) -> None:
        running = [asyncio.create_task(long_request(engine, setting, 1, n)) for n in range(16)]
        await asyncio.sleep(0.2)
        await engine.add_adapter(3, setting.adapters[3])
        fresh = await engine.generate(request(3, seed=0, max_tokens=4))
        assert not all(task.done() for task in running)
        assert mismatch(setting.policies[3], PROMPT, fresh, 1.0) < TOLERANCE
        await asyncio.gather(*running)
        await engine.remove_adapter(3)

    async def test_a_version_added_again_serves_the_new_files(self, engine: Engine, setting: Setting) -> None:
        """No adapter cache and no prefix cache (the prompt is longer than a KV block) holds on to the old."""
        prompt = tuple(3 + n % 90 for n in range(200))
        for source in (1, 2):
            await engine.add_adapter(3, setting.adapters[source])
            got = await engine.generate(request(3, seed=1, prompt=prompt))
            assert mismatch(setting.policies[source], prompt, got, 1.0) < TOLERANCE
            await engine.remove_adapter(3)
            with pytest.raises(KeyError):
                await engine.generate(request(3, seed=1))

    async def test_cancelling_aborts_one_request_only(self, engine: Engine, setting: Setting) -> None:
        *doomed, kept = (asyncio.create_task(long_request(engine, setting, 2, n)) for n in range(9))
        await asyncio.sleep(0.05)
        for task in doomed:
            task.cancel()
        outcomes = await asyncio.gather(*doomed, return_exceptions=True)
        assert any(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)
        await kept

    async def test_a_version_may_go_as_soon_as_its_requests_are_cancelled(
        self, engine: Engine, setting: Setting
    ) -> None:
        await engine.add_adapter(3, setting.adapters[3])
        for _ in range(3):
            doomed = [
                asyncio.create_task(engine.generate(request(3, n, max_tokens=400, temperature=0.0)))
                for n in range(8)
            ]
            await asyncio.sleep(0.03)
            for task in doomed:
                task.cancel()
            await asyncio.gather(*doomed, return_exceptions=True)
            await engine.remove_adapter(3)
            await engine.add_adapter(3, setting.adapters[3])
        got = await engine.generate(request(3, seed=0))
        assert mismatch(setting.policies[3], PROMPT, got, 1.0) < TOLERANCE
        await engine.remove_adapter(3)

    async def test_an_aborted_request_returns_what_it_drew(self, engine: Engine, setting: Setting) -> None:
        """Its tokens begin the undisturbed completion, and their logprobs are those of the policy."""
        asked = [
            request(1 + n % 2, seed=n, prompt=(*PROMPT, 3 + n), max_tokens=400, temperature=0.0)
            for n in range(8)
        ]
        start = time.monotonic()
        whole = await asyncio.gather(*map(engine.generate, asked))
        seconds = time.monotonic() - start
        most = max(len(one.token_ids) for one in whole)
        # A machine that is busy with other things may be slow at one time and quick at another.
        for share in (0.5, 0.3, 0.7, 0.2, 0.8, 0.5):
            again = [replace(one, request_id=f"cut-{n}-{next(_ids)}") for n, one in enumerate(asked)]
            running = [asyncio.create_task(engine.generate(one)) for one in again]
            await asyncio.sleep(share * seconds)
            await asyncio.gather(*(engine.abort(one.request_id) for one in again))
            cut = await asyncio.wait_for(asyncio.gather(*running), 5)
            for one, got, undisturbed in zip(again, cut, whole, strict=True):
                assert got.token_ids == undisturbed.token_ids[: len(got.token_ids)]
                assert (got.finish_reason == "abort") == (len(got.token_ids) < len(undisturbed.token_ids))
                assert got.policy_versions == (one.policy_version,) * len(got.token_ids)
                policy = setting.policies[one.policy_version]
                assert mismatch(policy, one.prompt_token_ids, got, 1.0) < TOLERANCE
            if any(0 < len(one.token_ids) < most and one.finish_reason == "abort" for one in cut):
                break
        else:
            pytest.fail("no request was ever cut while it ran")
        await engine.abort(again[0].request_id)  # has ended: no error

    async def test_a_request_aborted_at_once_returns(self, engine: Engine) -> None:
        """Before the engine has taken it in, or computed its prompt."""
        asked = [request(1, seed=n, max_tokens=400, temperature=0.0) for n in range(80)]
        running = [asyncio.create_task(engine.generate(one)) for one in asked]
        await asyncio.sleep(0)
        await asyncio.gather(*(engine.abort(one.request_id) for one in asked))
        cut = await asyncio.wait_for(asyncio.gather(*running), 5)
        assert any(got.finish_reason == "abort" for got in cut)

    async def test_a_continued_completion_has_the_logprobs_of_its_new_version(
        self, engine: Engine, setting: Setting
    ) -> None:
        """Two thirds of a greedy completion by version 1, the rest by 1 (the same tokens) and by 2; and at
        temperature 1, whose logprobs are those that `score` gives."""
        whole = await engine.generate(request(1, seed=0, max_tokens=24, temperature=0.0))
        prior = whole.token_ids[:16]
        same = await engine.generate(request(1, seed=9, max_tokens=8, temperature=0.0, prior=prior))
        assert prior + same.token_ids == whole.token_ids
        for seed in range(4):
            got = await engine.generate(request(2, seed=seed, max_tokens=8, prior=prior))
            assert len(got.token_ids) <= 8
            assert got.policy_versions == (2,) * len(got.token_ids)
            assert mismatch(setting.policies[2], PROMPT + prior, got, 1.0) < TOLERANCE
            scored = await engine.score(PROMPT + prior + got.token_ids, 2)
            assert got.logprobs == pytest.approx(scored[-len(got.token_ids) :], abs=TOLERANCE)


async def close_under_way(engine: Engine) -> None:
    """Closing answers everybody who waits, and those who come later."""
    running = [
        asyncio.create_task(engine.generate(request(1, seed=n, max_tokens=400, temperature=0.0)))
        for n in range(80)
    ]
    await asyncio.sleep(0.05)
    await asyncio.wait_for(engine.close(), 30)
    outcomes = await asyncio.wait_for(asyncio.gather(*running, return_exceptions=True), 5)
    assert any(isinstance(outcome, DroppedCompletion) for outcome in outcomes)
    assert all(isinstance(outcome, DroppedCompletion | SampledCompletion) for outcome in outcomes)
    with pytest.raises((DroppedCompletion, KeyError)):
        await engine.generate(request(1, seed=0))
