"""Held-out evaluation of committed versions."""

import pytest

from bucketrl.bucket import keys
from bucketrl.bucket.errors import IntegrityError, UserError
from bucketrl.bucket.records import BoundaryRecord, EvaluationRecord, decode
from bucketrl.rollout_worker import evaluate as evaluate_module
from bucketrl.rollout_worker.engine import DroppedCompletion, SamplingRequest
from bucketrl.rollout_worker.evaluate import EvaluationResult, evaluate, evaluate_versions
from bucketrl.rollout_worker.options import WorkerOptions

from .conftest import World
from .fakes import FakeRewards


async def run_evaluation(world: World, problems: int = 20) -> EvaluationResult:
    world.engine.folders[4] = world.folder
    seen: list[tuple[int, int]] = []
    result = await evaluate(
        world.engine,
        world.tokenizer,
        world.task,
        world.run,
        rewards=FakeRewards(world.task),  # type: ignore[arg-type]
        version=4,
        problems=problems,
        temperature=0.5,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == [(n, problems) for n in range(1, problems + 1)]
    return result


async def test_each_held_out_problem_is_answered_once_by_that_version(world: World) -> None:
    result = await run_evaluation(world)
    prompts = ["".join(map(chr, request.prompt_token_ids)) for request in world.engine.requests]
    assert sorted(prompts) == sorted(f"<heldout {n}>" for n in range(20))
    assert {(r.policy_version, r.temperature) for r in world.engine.requests} == {(4, 0.5)}
    assert set(result.rewards) == {0.0, 1.0}
    assert result.mean_reward == sum(result.rewards) / 20
    assert 1 <= result.mean_tokens <= 8
    assert result.failed == 0


async def test_an_evaluation_can_be_repeated(world: World) -> None:
    assert (await run_evaluation(world)).rewards == (await run_evaluation(world)).rewards


async def test_a_problem_without_an_answer_counts_as_zero_and_is_counted(world: World) -> None:
    async def drop_some(request: SamplingRequest) -> None:
        if request.request_id.endswith(("-3", "-7")):
            raise DroppedCompletion("logprob not finite")

    world.engine.before_draw = drop_some
    result = await run_evaluation(world)
    assert result.failed == 2
    assert result.rewards[3] == result.rewards[7] == 0.0
    assert len(result.rewards) == 20


async def test_more_problems_than_there_are_is_one_clear_line(world: World) -> None:
    with pytest.raises(UserError, match="held-out split has 20"):
        await run_evaluation(world, problems=21)


def evaluate_all(
    world: World, versions: list[int | None], monkeypatch: pytest.MonkeyPatch
) -> list[EvaluationResult]:
    monkeypatch.setattr(
        evaluate_module, "load_engine", lambda run, model_path, options: (world.tokenizer, world.engine)
    )
    monkeypatch.setattr(evaluate_module, "RewardPool", lambda task, **_: FakeRewards(task))
    return evaluate_versions(
        world.store,
        world.run,
        model_path=world.folder,
        task=world.task,
        versions=versions,
        problems=10,
        temperature=1.0,
        options=WorkerOptions(worker_id="evaluation", cache_dir=world.folder / "cache"),
        progress=lambda done, total: None,
    )


def test_versions_are_fetched_proved_evaluated_and_recorded(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        world.learner.commit(consume=(step,))
    results = evaluate_all(world, [0, None], monkeypatch)
    assert [result.version for result in results] == [0, 2]
    assert {request.policy_version for request in world.engine.requests} == {0, 2}
    assert world.engine.closed
    for result in results:
        [info] = world.store.list(f"{keys.EVALUATION_PREFIX}{result.version:08d}/")
        record = decode(EvaluationRecord, world.store.get(info.key))
        assert (record.version, record.problems, record.engine) == (result.version, 10, "fake 1")
        assert record.mean_reward == result.mean_reward


def test_a_version_that_was_never_committed_is_one_clear_line(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="version: 7 is not in the log"):
        evaluate_all(world, [7], monkeypatch)


def test_a_version_that_was_collected_is_one_clear_line(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in range(1, 5):
        world.learner.commit(consume=(step,))
    record = BoundaryRecord(
        run_id=world.run.run_id, step=2, collector_id="c", written_at="2026-03-01T12:00:00Z"
    )
    world.store.put(keys.boundary(2), record.encode())
    with pytest.raises(UserError, match=r"version: 2 has been collected; .* those of steps above 2"):
        evaluate_all(world, [0, 2], monkeypatch)
    assert [result.version for result in evaluate_all(world, [0, 3], monkeypatch)] == [0, 3]


def test_a_bucket_without_a_policy_is_one_clear_line(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.store.delete([keys.log(0), keys.log(1)])
    with pytest.raises(UserError, match="no committed policy version"):
        evaluate_all(world, [None], monkeypatch)


def test_an_engine_that_serves_the_base_model_is_not_evaluated(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.engine.serves_base = 1
    with pytest.raises(IntegrityError, match="serves the base model"):
        evaluate_all(world, [0], monkeypatch)
    assert world.engine.requests == []
