"""Real processes, real model, real store: a short run by hand, over S3, and under SIGKILL."""

import json
import random
import tomllib
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from tests.e2e.roles import Fleet, cli, fleet
from tests.support.s3 import S3Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 6
EXAMPLES = Path(__file__).parents[2] / "examples"


def shortened(name: str, folder: Path) -> Path:
    """An example's configuration, cut to a few small steps."""
    text = (EXAMPLES / name).read_text()
    settings = tomllib.loads(text)["algorithm"]
    text = text.replace(f"steps = {settings['steps']}", f"steps = {STEPS}", 1)
    text = text.replace(f"groups_per_step = {settings['groups_per_step']}", "groups_per_step = 4", 1)
    path = folder / "short.toml"
    path.write_text(text)
    assert tomllib.loads(text)["algorithm"]["steps"] == STEPS
    return path


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return shortened("tiny.toml", tmp_path)


def create(config: Path, bucket_url: str, env: dict[str, str] | None = None) -> None:
    made = cli("create", str(config), "--bucket", bucket_url, env=env)
    assert made.returncode == 0, made.stderr


def run_to_the_end(run: Fleet, seconds: float = 240) -> None:
    for role in run.roles:
        role.start()
    run.wait_for(lambda: not run.learner.alive, seconds=seconds, what="the learner's end")
    assert run.learner.wait(5) == 0, run.tails()
    for worker in run.workers:
        assert worker.wait(60) == 0, run.tails()


def assert_clean(bucket_url: str, env: dict[str, str] | None = None) -> None:
    audit = cli("audit", bucket_url, env=env)
    assert audit.returncode == 0, audit.stdout + audit.stderr


def test_three_roles_by_hand_reach_the_last_step(tmp_path: Path) -> None:
    """Proxy, worker and learner share two URLs; workers and learner exit by themselves; status is JSON. The task
    is an environment of two turns, and completions take up newer versions under way."""
    bucket_url = str(tmp_path / "bucket")
    env = {"PYTHONPATH": str(EXAMPLES)}
    create(shortened("second_try.toml", tmp_path), bucket_url, env)
    with fleet(bucket_url, tmp_path, env=env) as run:
        run_to_the_end(run)
        run.wait_for(lambda: run.step() == STEPS, seconds=10, what="the proxy's view of the last step")
        status = run.status()
        assert status is not None
        assert status["finished"] is True
        assert status["version"] == STEPS
        assert 0.0 <= float(str(status["reward"])) <= 1.0
    assert_clean(bucket_url)
    rows = [
        row
        for path in sorted((tmp_path / "bucket" / "trajectories").rglob("*.parquet"))
        for row in pq.ParquetFile(path).read().to_pylist()
    ]
    second = [row for row in rows if not all(row["loss_mask"])]
    assert second, "nobody was asked twice"
    assert all(row["loss_mask"][0] and row["loss_mask"][-1] for row in second)
    for row in second:
        pairs = zip(row["behaviour_logprobs"], row["loss_mask"], strict=True)
        assert {logprob for logprob, sampled in pairs if not sampled} == {0.0}


def test_two_workers_over_s3(config: Path, tmp_path: Path, s3_server: S3Server) -> None:
    """The same over an S3 server; the two workers both contribute."""
    bucket_url = f"s3://{s3_server.bucket}/run"
    create(config, bucket_url, env=s3_server.environment)
    with fleet(bucket_url, tmp_path, workers=2, env=s3_server.environment) as run:
        run_to_the_end(run, seconds=400)
    assert_clean(bucket_url, env=s3_server.environment)


@pytest.mark.parametrize("seed", [1, 2])
def test_any_role_killed_at_a_random_moment(config: Path, tmp_path: Path, seed: int) -> None:
    """SIGKILL to each role at a random step and moment, then the same command again. The run ends at the
    same step, no group is trained twice, and the same trajectories give the same adapter bytes."""
    rng = random.Random(seed)
    bucket_url = str(tmp_path / "bucket")
    create(config, bucket_url)
    # A replay reads every checkpoint's description.
    with fleet(bucket_url, tmp_path, learner=("--keep", "0")) as run:
        for role in run.roles:
            role.start()
        victims = run.roles
        rng.shuffle(victims)
        for victim in victims:
            at_step = max(run.step(), 0) + rng.randint(0, 1)
            run.wait_for(
                lambda at_step=at_step: run.step() >= min(at_step, STEPS - 1) or not run.learner.alive,
                seconds=200,
                what=f"step {at_step}",
            )
            if not run.learner.alive:
                break
            run.wait_for(lambda: rng.random() < 0.2, seconds=30, what="a random moment")
            victim.kill()
            victim.start()
        run.wait_for(lambda: not run.learner.alive, seconds=300, what="the learner's end")
        assert run.learner.wait(5) == 0, run.tails()
        run.wait_for(lambda: run.step() == STEPS, seconds=60, what="the proxy's view of the last step")
    assert_clean(bucket_url)
    replayed = cli("replay", bucket_url, str(tmp_path / "replay"))
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr


def test_run_command_with_vllm(config: Path, tmp_path: Path) -> None:
    """`bucketrl run` starts all three roles with the vLLM engine and ends with a summary, a plot, a record."""
    bucket_url = str(tmp_path / "bucket")
    plot = tmp_path / "reward.png"
    done = cli(
        "run", str(config), "--bucket", bucket_url, "--engine", "vllm", "--plot", str(plot), "--evaluate", "32",
        timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "held-out" in done.stdout
    newest = sorted((tmp_path / "bucket" / "log").glob("*.json"))[-1]
    assert json.loads(newest.read_text())["step"] == STEPS
    assert_clean(bucket_url)
