"""Which GPUs each engine gets, what is refused before anything is loaded, and that only children see a slice."""

import multiprocessing
import os
import threading
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bucketrl.bucket.errors import UserError
from bucketrl.rollout_worker.engines import create_engine, placement
from bucketrl.rollout_worker.engines.placement import (
    DEVICES_VARIABLE,
    check_split,
    parse_devices,
    place,
    start_seeing,
    visible_gpus,
)
from bucketrl.rollout_worker.engines.settings import EngineSettings


def make_settings(folder: Path) -> EngineSettings:
    return EngineSettings(
        model_path=folder,
        dtype="float32",
        max_model_len=64,
        lora_rank=8,
        lora_targets=("q_proj",),
        adapter_slots=3,
        max_requests=4,
        stop_token_ids=(0,),
        seed=0,
    )


EIGHT = tuple("01234567")


@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 3), st.integers(1, 16))
def test_no_gpu_has_two_engines_and_no_engine_too_few(
    engines: int, tensor: int, pipeline: int, count: int
) -> None:
    gpus = tuple(f"GPU-{n}" for n in range(count))
    if engines * tensor * pipeline > count:
        with pytest.raises(UserError, match=rf"take {engines * tensor * pipeline} GPUs, {count} are visible"):
            place(engines, tensor, pipeline, gpus)
        return
    placed = place(engines, tensor, pipeline, gpus)
    assert [len(devices) for devices in placed] == [tensor * pipeline] * engines
    used = [device for devices in placed for device in devices]
    assert used == list(gpus[: len(used)])


def test_engines_on_a_cpu_share_it_and_are_not_split() -> None:
    assert place(3, 1, 1, ()) == ((), (), ())
    for tensor, pipeline in ((2, 1), (1, 2)):
        with pytest.raises(UserError, match=rf"{tensor} x {pipeline}, but no GPU is visible"):
            place(1, tensor, pipeline, ())


@pytest.mark.parametrize(
    ("named", "devices"),
    [
        ("", ()),
        ("-1", ()),
        ("0,1", ("0", "1")),
        (" 3 , GPU-ab ", ("3", "GPU-ab")),
        ("2,-1,3", ("2",)),
        ("2,,3", ("2",)),
        ("MIG-1,MIG-2", ("MIG-1", "MIG-2")),
    ],
)
def test_devices_are_read_as_cuda_reads_them(named: str, devices: tuple[str, ...]) -> None:
    assert parse_devices(named) == devices


def test_without_the_variable_the_driver_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nprintf '0\\n1\\n'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv(DEVICES_VARIABLE, raising=False)
    assert visible_gpus() == ("0", "1")
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert visible_gpus() == ()
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert visible_gpus() == ()
    monkeypatch.setenv(DEVICES_VARIABLE, "5")
    assert visible_gpus() == ("5",)


def test_a_model_that_cannot_be_split_is_refused_by_name() -> None:
    model = {"num_attention_heads": 12, "num_hidden_layers": 6}
    check_split(model, 4, 6)
    with pytest.raises(
        UserError, match=r"tensor_parallel: 8 .* 12 attention heads; choose one of 1, 2, 3, 4, 6"
    ):
        check_split(model, 8, 1)
    with pytest.raises(UserError, match=r"pipeline_parallel: 7 .* 6 layers"):
        check_split(model, 1, 7)
    with pytest.raises(UserError, match="tensor_parallel"):
        check_split({"text_config": model}, 8, 1)
    check_split({}, 8, 8)


def test_the_transformers_engine_is_not_split(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="runs on one device"):
        create_engine("transformers", replace(make_settings(tmp_path), tensor_parallel=2))


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed here")
def test_the_engines_name_says_how_it_is_split(tmp_path: Path) -> None:
    made = replace(make_settings(tmp_path), tensor_parallel=2, pipeline_parallel=4)
    assert create_engine("vllm", made).name.endswith(" tp=2 pp=4")


class FakeStart:
    """Starts a process as vLLM does, and goes on working after that until it is released."""

    def __init__(self, answer: Path, name: str = "EngineCore_DP0") -> None:
        self._answer = answer
        self._name = name
        self.loading = threading.Event()
        self.release = threading.Event()

    def __call__(self, arguments: Any) -> str:
        command = f"printf %s \"${{{DEVICES_VARIABLE}-all}}\" > '{self._answer}'"
        process = multiprocessing.get_context("spawn").Process(
            target=os.system, args=(command,), name=self._name
        )
        process.start()
        self.loading.set()
        assert self.release.wait(60)
        process.join()
        return self._answer.read_text()


def starting(devices: tuple[str, ...], start: FakeStart, seen: list[str]) -> threading.Thread:
    thread = threading.Thread(target=lambda: seen.append(start_seeing(devices, start, None)))
    thread.start()
    return thread


@pytest.mark.slow
@pytest.mark.parametrize("before", [None, "4,5,6"])
def test_engines_load_side_by_side_and_each_sees_its_own_gpus(
    before: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The second starts while the first still loads; by then this process has its own environment again."""
    monkeypatch.delenv(DEVICES_VARIABLE, raising=False)
    if before is not None:
        monkeypatch.setenv(DEVICES_VARIABLE, before)
    starts = [FakeStart(tmp_path / "first"), FakeStart(tmp_path / "second")]
    seen: list[str] = []
    threads = []
    for devices, start in zip((("4",), ("5", "6")), starts, strict=True):
        threads.append(starting(devices, start, seen))
        assert start.loading.wait(60)
    with placement._environment:
        assert os.environ.get(DEVICES_VARIABLE) == before
    for start, thread in zip(starts, threads, strict=True):
        start.release.set()
        thread.join(60)
    assert seen == ["4", "5,6"]


@pytest.mark.slow
def test_a_start_that_is_not_recognised_keeps_the_next_one_waiting(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Then nothing goes wrong either."""
    monkeypatch.delenv(DEVICES_VARIABLE, raising=False)
    first, second = FakeStart(tmp_path / "first", "Other"), FakeStart(tmp_path / "second")
    seen: list[str] = []
    threads = [starting(("4",), first, seen)]
    assert first.loading.wait(60)
    threads.append(starting(("5",), second, seen))
    assert not second.loading.wait(0.3)
    first.release.set()
    threads[0].join(60)
    second.release.set()
    threads[1].join(60)
    assert seen == ["4", "5"]
    assert DEVICES_VARIABLE not in os.environ


def test_a_start_that_fails_leaves_the_environment_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEVICES_VARIABLE, "7")

    def fail(arguments: Any) -> None:
        raise ValueError("no such model")

    with pytest.raises(ValueError, match="no such model"):
        start_seeing(("4",), fail, None)
    assert os.environ[DEVICES_VARIABLE] == "7"
