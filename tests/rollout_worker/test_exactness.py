"""The engine's log-probabilities are the learner's own: those of its packed forward pass on the adapter files
that it wrote. test_vllm_engine.py inherits the same for vLLM."""

import asyncio
from dataclasses import replace

import pytest

from bucketrl.bucket.completions import Completion
from bucketrl.rollout_worker.canary import canary_failure
from bucketrl.rollout_worker.continuation import joined
from bucketrl.rollout_worker.engine import Engine

from .engine_contract import request
from .learned import TEMPERATURES, VERSIONS, Learned, begun, largest_difference, mixed_up, uploaded

TOLERANCE = 1e-3
"""Nats, float32."""
PROMPT = tuple(3 + 7 * n % 90 for n in range(200))
"""Longer than a block of any KV cache here, and the same for every version: a prefix cache is put to use."""
CHUNK = 8


class Exactness:
    """Needs the module fixtures `engine`, with the adapters of `learned` added."""

    @pytest.mark.parametrize("count", [1, 32])
    @pytest.mark.parametrize("temperature", TEMPERATURES)
    async def test_logprobs_are_the_learners(
        self, engine: Engine, learned: Learned, temperature: float, count: int
    ) -> None:
        """`count` requests at once, of all versions in turn. The prompt was computed under others before."""

        async def draw(sample: int) -> Completion:
            version = VERSIONS[sample % len(VERSIONS)]
            asked = request(version, seed=sample, prompt=PROMPT, temperature=temperature)
            return joined(begun(sample, PROMPT), await engine.generate(asked), 0.0)

        samples = range(max(count, len(VERSIONS)))
        if count == 1:
            completions = [await draw(sample) for sample in samples]
        else:
            completions = list(await asyncio.gather(*map(draw, samples)))
        self._compare(completions, learned, temperature)

    @pytest.mark.parametrize("count", [1, 32])
    @pytest.mark.parametrize("temperature", TEMPERATURES)
    async def test_each_token_is_that_of_its_own_version_across_switches(
        self, engine: Engine, learned: Learned, temperature: float, count: int
    ) -> None:
        """Each completion goes on with the next version every few tokens, from token ids alone."""

        async def draw(sample: int) -> Completion:
            so_far = begun(sample, PROMPT)
            for part in range(len(VERSIONS)):
                drawn = await engine.generate(
                    request(
                        VERSIONS[(sample + part) % len(VERSIONS)],
                        seed=1000 * part + sample,
                        prompt=PROMPT,
                        max_tokens=CHUNK,
                        temperature=temperature,
                        prior=so_far.completion_token_ids,
                    )
                )
                so_far = joined(so_far, drawn, 0.0)
                if drawn.finish_reason == "stop":
                    break
            return so_far

        if count == 1:
            completions = [await draw(sample) for sample in range(2)]
        else:
            completions = list(await asyncio.gather(*map(draw, range(count))))
        assert any(set(one.policy_versions) == set(VERSIONS) for one in completions)
        self._compare(completions, learned, temperature)

    @staticmethod
    def _compare(completions: list[Completion], learned: Learned, temperature: float) -> None:
        group = uploaded(completions)
        for drawn, read in zip(completions, group.trajectories, strict=True):
            assert drawn.completion_token_ids == read.completion_token_ids
        policies = learned.policies[temperature]
        difference = largest_difference(group, policies)
        assert difference <= TOLERANCE, f"measured maximum {difference:.2g}"
        # The comparison can fail: with another version's adapter, and at another temperature.
        other_temperature = next(t for t in TEMPERATURES if t != temperature)
        assert largest_difference(group, mixed_up(policies)) > 100 * TOLERANCE
        assert largest_difference(group, learned.policies[other_temperature]) > 100 * TOLERANCE

    async def test_the_learners_canary_tells_its_version_from_all_others(
        self, engine: Engine, learned: Learned
    ) -> None:
        for version in VERSIONS:
            canary = learned.canary(version)
            for served in (None, *VERSIONS):
                measured = await engine.score(canary.token_ids, served)
                failure = canary_failure(measured, canary, "float32")
                assert (failure is None) == (served == version), f"{version} by {served}: {failure}"
                assert served is not None or "serves the base model" in str(failure)

    async def test_an_end_token_that_is_the_last_allowed_one_is_a_stop(
        self, engine: Engine, learned: Learned
    ) -> None:
        """And one token earlier the same completion ends for its length."""
        asked = [request(11, seed=n, max_tokens=64, temperature=2.0) for n in range(16)]
        drawn = await asyncio.gather(*map(engine.generate, asked))
        ended = next(
            n for n, got in enumerate(drawn) if got.finish_reason == "stop" and len(got.token_ids) > 1
        )
        whole = drawn[ended].token_ids
        exact, short = await asyncio.gather(
            engine.generate(replace(asked[ended], request_id="exact", max_tokens=len(whole))),
            engine.generate(replace(asked[ended], request_id="short", max_tokens=len(whole) - 1)),
        )
        assert (exact.token_ids, exact.finish_reason) == (whole, "stop")
        assert (short.token_ids, short.finish_reason) == (whole[:-1], "length")

    async def test_the_seed_decides_in_any_company(self, engine: Engine, learned: Learned) -> None:
        asked = request(12, seed=7, prompt=PROMPT)
        alone = await engine.generate(asked)
        together, *_ = await asyncio.gather(
            engine.generate(replace(asked, request_id="together")),
            *(engine.generate(request(VERSIONS[n % 3], seed=n, prompt=PROMPT[n:])) for n in range(31)),
        )
        assert together.token_ids == alone.token_ids


@pytest.mark.asyncio(loop_scope="module")
class TestTransformersExactness(Exactness):
    pass
