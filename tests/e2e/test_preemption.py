"""SIGTERM to a real rollout worker in mid-generation: it is gone in time, and another one has its tokens."""

import os
import signal
import time
from pathlib import Path

import httpx
import pytest
from tests.e2e.roles import READ_TOKEN, Fleet, cli, fleet
from tests.support.long_winded import long_winded_model

from bucketrl.bucket import keys, partials, trajectories
from bucketrl.bucket.partials import PartialGroup
from bucketrl.bucket.store import Store
from bucketrl.bucket.stores import open_store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

GRACE_S = 10.0
STEPS = 3
ANY_VERSION = 10**6
CONFIG = """
name = "preemption"
[model]
id = "{model}"
[lora]
rank = 8
[task]
kind = "arithmetic"
reward = "odd_length:reward"
[sampling]
group_size = 8
max_tokens = 200
[algorithm]
steps = {steps}
groups_per_step = 8
max_staleness = 4
[rollout]
max_model_len = 256
"""
REWARD = (
    "def reward(messages, completion, reference, finish_reason):\n    return float(len(completion) % 2)\n"
)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    model = long_winded_model(tmp_path)
    (tmp_path / "odd_length.py").write_text(REWARD)
    path = tmp_path / "preemption.toml"
    path.write_text(CONFIG.format(model=model, steps=STEPS))
    return path


def running_requests(run: Fleet) -> int:
    reply = httpx.get(
        f"{run.proxy_url}/v1/workers", headers={"Authorization": f"Bearer {READ_TOKEN}"}, timeout=5
    )
    states = [worker["state"] for worker in reply.json() if worker["role"] == "rollout"]
    return max((int(state["running_requests"]) for state in states), default=0)


def left_behind(store: Store, run_id: str) -> dict[str, PartialGroup]:
    """By group id."""
    found = {}
    for info in store.list(keys.PARTIAL_PREFIX):
        parsed = keys.parse_partial(info.key)
        assert parsed is not None, info.key
        group_id, attempt = str(parsed[0]), parsed[1]
        found[group_id] = partials.decode(
            store.get(info.key), run_id=run_id, group_id=group_id, attempt=attempt, max_version=ANY_VERSION
        )
    return found


def uploaded(store: Store, group_id: str) -> list[str]:
    return [info.key for info in store.list(f"{keys.TRAJECTORY_PREFIX}{group_id}/")]


def preempt(run: Fleet, store: Store) -> None:
    """Stops the first worker in mid-generation, and the learner, so that no commit makes its tokens stale."""
    worker, learner = run.workers[0], run.learner
    for _ in range(5):
        for role in (worker, learner):
            if not role.alive:
                role.start()
        run.wait_for(lambda: run.step() >= 1 and running_requests(run) > 0, seconds=120, what="requests")
        assert worker.process is not None
        os.kill(worker.process.pid, signal.SIGTERM)
        start = time.monotonic()
        learner.kill()
        assert worker.wait(2 * GRACE_S) == 0, run.tails()
        assert time.monotonic() - start < GRACE_S
        if any(True for _ in store.list(keys.PARTIAL_PREFIX)):
            return
    raise AssertionError("never met in mid-generation\n" + run.tails())


def test_another_worker_goes_on_where_a_preempted_one_was_stopped(config: Path, tmp_path: Path) -> None:
    bucket_url = str(tmp_path / "bucket")
    env = {"PYTHONPATH": str(tmp_path)}
    made = cli("create", str(config), "--bucket", bucket_url, env=env)
    assert made.returncode == 0, made.stderr
    store = open_store(bucket_url)
    with fleet(bucket_url, tmp_path, workers=2, env=env) as run:
        run.workers[0].arguments += ["--grace", str(GRACE_S), "--worker-id", "first"]
        run.workers[1].arguments += ["--worker-id", "second"]
        run.proxy.start()
        preempt(run, store)
        run_id = str(run.status()["run_id"])  # type: ignore[index]
        left = left_behind(store, run_id)
        assert any(c.finish_reason == "" for group in left.values() for c in group.completions)
        run.workers[1].start()
        run.wait_for(
            lambda: all(uploaded(store, group_id) for group_id in left), seconds=120, what="the groups"
        )
        for group_id, group in left.items():
            [key] = uploaded(store, group_id)
            attempt = key.rpartition("/")[2].removesuffix(".parquet")
            whole = trajectories.decode(
                store.get(key), run_id=run_id, group_id=group_id, attempt=attempt, max_version=ANY_VERSION
            )
            assert (group.worker_id, whole.worker_id) == ("first", "second")
            by_sample = {trajectory.sample: trajectory for trajectory in whole.trajectories}
            for begun in group.completions:
                ended, drawn = by_sample[begun.sample], len(begun.completion_token_ids)
                for column in ("completion_token_ids", "behaviour_logprobs", "policy_versions"):
                    assert getattr(ended, column)[:drawn] == getattr(begun, column)
                assert (len(ended.completion_token_ids) > drawn) == (begun.finish_reason == "")
        run.learner.start()
        run.wait_for(lambda: not run.learner.alive, seconds=240, what="the learner's end")
        assert run.learner.wait(5) == 0, run.tails()
    audit = cli("audit", bucket_url)
    assert audit.returncode == 0, audit.stdout + audit.stderr
