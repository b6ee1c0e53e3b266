"""`run_worker` from start to exit, signals included, on the fake engine and real reward processes."""

import asyncio
import os
import signal
import threading
from pathlib import Path

import pytest

from bucketrl.bucket.errors import UserError
from bucketrl.rollout_worker import main
from bucketrl.rollout_worker.engine import SamplingRequest
from bucketrl.rollout_worker.main import WorkerOptions, run_worker

from .conftest import World
from .fakes import uploaded_groups

pytestmark = pytest.mark.slow


def work(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "load_engine", lambda run, model_path, options: (world.tokenizer, world.engine))
    run_worker(
        world.store,
        world.run,
        model_path=world.folder,
        task=world.task,
        client=world.proxy,  # type: ignore[arg-type]
        options=WorkerOptions(
            worker_id="w0", cache_dir=world.folder / "cache", max_groups_in_flight=2, grace_s=5.0
        ),
    )


def when(condition: object, action: object) -> threading.Thread:
    """Runs `action` in a thread as soon as `condition` holds."""

    def watch() -> None:
        for _ in range(3000):
            if condition():  # type: ignore[operator]
                action()  # type: ignore[operator]
                return
            threading.Event().wait(0.01)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_worker_in_good_order(
    world: World, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    async def hang_later(request: SamplingRequest) -> None:
        if int(request.request_id[5:13]) >= 3:
            await asyncio.Event().wait()

    world.engine.before_draw = hang_later
    ready = lambda: len(world.proxy.completed) == 3 and len(world.engine.running) == 6  # noqa: E731
    when(ready, lambda: os.kill(os.getpid(), number))
    work(world, monkeypatch)
    assert len(uploaded_groups(world.store, world.run, 0)) == 3
    completed = {lease_id for lease_id, _ in world.proxy.completed}
    assert completed | set(world.proxy.released) == set(world.proxy.leased)
    assert world.engine.closed
    assert list(Path(world.folder / "cache" / "adapters").iterdir()) == []


def test_a_task_of_another_size_is_refused_before_anything_starts(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Group ids would name other prompts than on the other machines."""
    monkeypatch.setattr(world.task, "size", lambda split: 999)
    with pytest.raises(UserError, match="task: it has 999 training prompts here, but 1000"):
        work(world, monkeypatch)
    assert world.proxy.heartbeats == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("worker_id", "W_0"),
        ("worker_id", ""),
        ("max_groups_in_flight", 0),
        ("reward_processes", 0),
        ("grace_s", -1.0),
        ("gpu_memory_utilization", 1.5),
    ],
)
def test_options_that_cannot_work_are_refused_by_name(tmp_path: Path, field: str, value: object) -> None:
    with pytest.raises(UserError, match=field):
        WorkerOptions(**({"worker_id": "w0", "cache_dir": tmp_path} | {field: value}))


def test_the_end_of_the_run_ends_the_worker(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    when(lambda: len(world.proxy.completed) >= 3, lambda: setattr(world.proxy, "finished", True))
    work(world, monkeypatch)
    assert world.engine.closed
