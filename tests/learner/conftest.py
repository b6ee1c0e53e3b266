from pathlib import Path

import pytest
import torch
from tests.learner.runs import CONFIG, STEPS, World
from tests.learner.worlds import (
    CPU,
    make_group,
    put_group,
    replace_first,
    sample_group,
    save_tiny_model,
    stock_model,
    untrained_groups,
)

from bucketrl.bucket.stores.memory import MemoryStore
from bucketrl.bucket.trajectories import TrajectoryGroup
from bucketrl.learner.model import PolicyModel
from bucketrl.learner.publish import save_adapter


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny random model. Tests must not write there."""
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def sampled(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> MemoryStore:
    """The trajectories of a whole run, all sampled with version 0: real ones, a group without signal, a
    corrupt attempt beside a good one, an attempt of another run."""
    folder = tmp_path_factory.mktemp("version-0")
    save_adapter(folder, PolicyModel.load(model_folder, CONFIG, CPU))
    stock = stock_model(model_folder, folder)
    store = MemoryStore()
    for ordinal in range(2 * STEPS + 2):
        put_group(store, sample_group(stock, ordinal, config=CONFIG, version=0))
    put_group(store, make_group(1, rewards=[1.0, 1.0]))
    torn = put_group(store, make_group(4, rewards=[1.0, 0.0], attempt="worker-0-0"))
    store.put(torn, store.get(torn)[:-50])
    return store


@pytest.fixture(scope="session")
def groups(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[TrajectoryGroup]:
    """Three groups of different prompts, slightly off-policy, one completion partly masked."""
    first, *others = untrained_groups(model_folder, tmp_path_factory.mktemp("adapter"), 3)
    mask = (False, *first.trajectories[0].loss_mask[1:])
    return [replace_first(first, loss_mask=mask), *others]


@pytest.fixture
def world(model_folder: Path, tmp_path: Path, sampled: MemoryStore) -> World:
    return World(model_folder, tmp_path, sampled)


@pytest.fixture(scope="session")
def undisturbed(model_folder: Path, tmp_path_factory: pytest.TempPathFactory, sampled: MemoryStore) -> World:
    made = World(model_folder, tmp_path_factory.mktemp("undisturbed"), sampled)
    made.learn()
    return made
