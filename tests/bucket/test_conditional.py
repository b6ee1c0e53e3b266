"""`conditional.create` knows its own writes."""

import pytest

from bucketrl.bucket import conditional
from bucketrl.bucket.errors import AlreadyExists, NotFound, StoreError, Unsupported
from bucketrl.bucket.retry import Transient
from bucketrl.bucket.stores.memory import MemoryStore


class Unreliable(MemoryStore):
    """Replies are lost: before the object is there for each `False` in `faults`, after it for each `True`."""

    def __init__(self, *faults: bool) -> None:
        super().__init__()
        self.faults = list(faults)
        self.sent: list[bytes] = []

    def create(self, key: str, data: bytes) -> None:
        self.sent.append(data)
        if not self.faults:
            super().create(key, data)
        elif self.faults.pop(0):
            super().create(key, data)
            raise Transient("connection reset")
        else:
            raise Transient("connection refused")


def test_the_first_creator_wins_and_the_next_gets_its_bytes() -> None:
    store = MemoryStore()
    assert conditional.create(store, "k", b"mine") is None
    assert conditional.create(store, "k", b"theirs") == b"mine"
    assert store.get("k") == b"mine"


@pytest.mark.parametrize("faults", [(True,), (False,), (False, True), (False, False)])
def test_a_create_whose_reply_was_lost_is_sent_again_with_the_same_bytes(faults: tuple[bool, ...]) -> None:
    store = Unreliable(*faults)
    assert conditional.create(store, "k", b"mine", sleep=lambda _: None) is None
    assert store.get("k") == b"mine"
    assert set(store.sent) == {b"mine"}


def test_an_unknown_outcome_is_settled_by_calling_again() -> None:
    store = Unreliable(False, False, False, True)
    with pytest.raises(StoreError, match="connection reset"):
        conditional.create(store, "k", b"mine", sleep=lambda _: None)
    assert conditional.create(store, "k", b"mine") is None


def test_equal_records_of_two_writers_differ_by_their_write_id() -> None:
    store = Unreliable(True)
    assert conditional.create(store, "k", b'{"write_id": "a"}', sleep=lambda _: None) is None
    assert conditional.create(store, "k", b'{"write_id": "b"}') == b'{"write_id": "a"}'


def test_a_winner_that_does_not_show_yet_is_waited_for() -> None:
    class Late(MemoryStore):
        reads = 0

        def create(self, key: str, data: bytes) -> None:
            raise AlreadyExists(key)

        def get(self, key: str) -> bytes:
            self.reads += 1
            if self.reads < 3:
                raise NotFound(key)
            return b"theirs"

    waits: list[float] = []
    found = conditional.create(Late(), "k", b"mine", sleep=waits.append, uniform=lambda _, high: high)
    assert found == b"theirs"
    assert waits == [0.5, 1.0]


def test_a_store_without_the_primitive_is_not_tried_again() -> None:
    class Tier0(MemoryStore):
        calls = 0

        def create(self, key: str, data: bytes) -> None:
            self.calls += 1
            raise Unsupported(key)

    store = Tier0()
    with pytest.raises(Unsupported):
        conditional.create(store, "k", b"mine")
    assert store.calls == 1
