"""The data-parallel benchmark in small: two processes on the CPU, forked so that they are there at once."""

import multiprocessing
from dataclasses import replace

import pytest
import torch
from benchmarks.data_parallel_gpu import WORKLOADS, measure

from bucketrl.learner import data_parallel


@pytest.mark.slow
def test_two_processes_have_the_gradient_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(data_parallel, "get_context", lambda _: multiprocessing.get_context("fork"))
    workload = replace(WORKLOADS["cpu"], rounds=1)
    figures = measure(workload, torch.device("cpu"), 2)
    assert 0.0 < figures["gradient_difference"] <= workload.tolerance
    assert figures["gradient_difference_of_one_to_itself"] == 0.0
    assert figures["metrics_difference"] <= 1e-5
    assert figures["speedup"] == 2 * figures["scaling_efficiency"] > 0.0
