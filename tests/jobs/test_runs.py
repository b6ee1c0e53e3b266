"""Creating a run, joining it, refusing another one's bucket."""

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from tests.bucket.builders import Learner, group, run_record, upload
from tests.jobs.worlds import save_model_files, toml

from bucketrl.bucket import keys
from bucketrl.bucket.config import RunConfig
from bucketrl.bucket.errors import StoreError, UserError
from bucketrl.bucket.records import RunRecord, decode
from bucketrl.bucket.store import ObjectInfo, Store, Tier
from bucketrl.bucket.stores import open_store
from bucketrl.jobs.config_file import load_config
from bucketrl.jobs.runs import create, create_or_join, is_finished, load_model, open_run, read_log


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_model_files(tmp_path / "model")


@pytest.fixture
def store() -> Store:
    return open_store(f"memory://{uuid4().hex}")


def config(folder: Path, model: Path | str, /, **changes: str) -> RunConfig:
    path = folder / f"{uuid4().hex}.toml"
    path.write_text(toml(model, **changes))
    return load_config(path)


def make(store: Store, settings: RunConfig) -> RunRecord:
    return create_or_join(store, settings, progress=lambda _: None)


def listing(store: Store) -> list[str]:
    return [info.key for info in store.list("")]


class TestCreate:
    def test_an_empty_bucket_gets_run_json_and_nothing_else(
        self, tmp_path: Path, model: Path, store: Store
    ) -> None:
        """The probe leaves nothing behind; what is returned is what is stored."""
        run = make(store, config(tmp_path, model))
        assert listing(store) == [keys.RUN]
        assert decode(RunRecord, store.get(keys.RUN)) == run
        assert run.run_id.startswith("demo-")
        assert run.prompts_per_epoch == 10_000

    def test_more_passes_than_a_group_id_can_count_are_refused(
        self, tmp_path: Path, model: Path, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Before anything is written."""
        monkeypatch.setattr(keys, "MAX_PROMPT_EPOCH", 0)
        with pytest.raises(
            UserError, match=r"^task: 10000 training prompts .* give it more prompts or fewer"
        ):
            make(store, config(tmp_path, model))
        assert listing(store) == []

    def test_the_same_configuration_joins(self, tmp_path: Path, model: Path, store: Store) -> None:
        """Twice the same command is one run."""
        assert make(store, config(tmp_path, model)) == make(store, config(tmp_path, model))

    def test_another_configuration_is_refused_by_the_first_field_that_differs(
        self, tmp_path: Path, model: Path, store: Store
    ) -> None:
        """The line names the run, the field, both values and the way out; run.json stays as it was."""
        first = make(store, config(tmp_path, model))
        before = store.get(keys.RUN)
        other = config(tmp_path, model, algorithm="steps = 3\ngroups_per_step = 5")
        with pytest.raises(UserError) as caught:
            make(store, other)
        message = str(caught.value)
        for word in (first.run_id, "algorithm.groups_per_step", "is 2", "not 5", "another bucket"):
            assert word in message
        assert store.get(keys.RUN) == before

    def test_a_task_that_differs_is_refused_too(self, tmp_path: Path, model: Path, store: Store) -> None:
        """[task] is a plain table: keys that only one side has count."""
        make(store, config(tmp_path, model))
        with pytest.raises(UserError, match=r"task\.terms is None, not 3"):
            make(store, config(tmp_path, model, task='kind = "arithmetic"\nterms = 3'))

    def test_whoever_is_slower_gets_the_winners_run(self, tmp_path: Path, model: Path, store: Store) -> None:
        """Two machines create at once: both work on the one run that the store took."""
        settings = config(tmp_path, model)
        winner = make(open_store(f"memory://{uuid4().hex}"), settings)
        racing = Racing(store, winner.encode())
        assert create(racing, settings, progress=lambda _: None) == winner

    def test_a_prefix_with_other_objects_is_refused(self, tmp_path: Path, model: Path, store: Store) -> None:
        store.put("photos/cat.jpg", b"meow")
        with pytest.raises(UserError, match=r"holds photos/cat\.jpg but no run\.json"):
            make(store, config(tmp_path, model))
        assert listing(store) == ["photos/cat.jpg"]

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"lora": 'rank = 8\ntarget_modules = ["q_proj", "w_proj"]'}, "no linear layer 'w_proj'"),
            ({"model": 'id = "./nowhere"'}, "model.id ./nowhere"),
            ({"task": 'kind = "jsonl"\npath = "nowhere.jsonl"\nheldout_size = 2'}, "nowhere.jsonl"),
        ],
        ids=["lora target", "model", "task"],
    )
    def test_nothing_is_written_when_anything_is_wrong(
        self, tmp_path: Path, model: Path, store: Store, changes: dict[str, str], words: str
    ) -> None:
        with pytest.raises(Exception, match=words):
            make(store, config(tmp_path, model, **changes))
        assert listing(store) == []


class TestJoinByHand:
    def test_a_role_on_an_empty_bucket_is_told_to_create(self, store: Store) -> None:
        with pytest.raises(UserError, match="holds no run; write one with: bucketrl create"):
            open_run(store)

    def test_a_role_with_other_weights_is_refused(self, tmp_path: Path, model: Path, store: Store) -> None:
        """By content: the folder's name is the same on both machines."""
        run = make(store, config(tmp_path, model))
        assert load_model(run, progress=lambda _: None) == model
        (model / "config.json").write_text((model / "config.json").read_text() + "\n")
        with pytest.raises(UserError, match="weights_sha256"):
            load_model(run, progress=lambda _: None)

    def test_a_foreign_run_json_is_one_line(self, store: Store) -> None:
        store.put(keys.RUN, b'{"kind": "run"}')
        with pytest.raises(UserError, match=r"run\.json: not a RunRecord"):
            open_run(store)

    def test_a_store_that_fails_is_one_line(self, store: Store) -> None:
        with pytest.raises(UserError, match="cannot be read: down"):
            open_run(Broken(store))


def test_a_run_is_finished_with_its_last_step(store: Store) -> None:
    """Not before, and not by a start record behind it."""
    run = run_record(steps=1)
    learner = Learner(store, run, "a")
    assert not is_finished(store, run)
    learner.start()
    learner.commit()
    assert not is_finished(store, run)
    learner.commit(learner.write_batch([upload(store, group(0)), upload(store, group(1))]))
    assert is_finished(store, run)
    learner.start()
    assert is_finished(store, run)
    assert [record.kind for record in read_log(store, run)] == ["start", "step", "step", "start"]


class Wrapped:
    """A store that does what another does."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.url, self.tier = store.url, Tier.CREATE

    def get(self, key: str) -> bytes:
        return self._store.get(key)

    def put(self, key: str, data: bytes) -> None:
        self._store.put(key, data)

    def create(self, key: str, data: bytes) -> None:
        self._store.create(key, data)

    def put_file(self, key: str, path: Path) -> None:
        self._store.put_file(key, path)

    def get_file(self, key: str, path: Path) -> None:
        self._store.get_file(key, path)

    def size(self, key: str) -> int:
        return self._store.size(key)

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        return self._store.list(prefix, start_after)

    def delete(self, names: "list[str]") -> None:
        self._store.delete(names)


class Racing(Wrapped):
    """Somebody else's run.json appears at the last moment."""

    def __init__(self, store: Store, theirs: bytes) -> None:
        super().__init__(store)
        self._theirs = theirs

    def create(self, key: str, data: bytes) -> None:
        if key == keys.RUN:
            self._store.put(key, self._theirs)
        super().create(key, data)


class Broken(Wrapped):
    def get(self, key: str) -> bytes:
        raise StoreError("down")
