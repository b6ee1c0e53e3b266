"""Retries wait as told, give up in the end, and `conditional.create` knows its own writes."""

import pytest

from bucketrl.bucket import conditional
from bucketrl.bucket.errors import AlreadyExists, NotFound
from bucketrl.bucket.retry import Transient, retrying
from bucketrl.bucket.stores.memory import MemoryStore


def test_only_transient_errors_are_retried() -> None:
    calls = []

    def call() -> None:
        calls.append(1)
        raise NotFound("x")

    with pytest.raises(NotFound):
        retrying(call, sleep=lambda _: None)
    assert len(calls) == 1


def test_waits_grow_with_full_jitter_and_never_undercut_the_server() -> None:
    waits: list[float] = []
    answers: list[float | None] = [None, None, 7.0, None]

    def call() -> str:
        if answers:
            raise Transient("busy", answers.pop(0))
        return "done"

    assert retrying(call, base_s=1.0, cap_s=3.0, sleep=waits.append, uniform=lambda _, high: high) == "done"
    assert waits == [1.0, 2.0, 7.0, 3.0]


def test_the_last_error_passes_through() -> None:
    with pytest.raises(Transient, match="still busy"):
        retrying(_busy, attempts=3, sleep=lambda _: None)


def _busy() -> None:
    raise Transient("still busy")


class LostReply(MemoryStore):
    """The first create succeeds and nobody hears of it."""

    lost = False

    def create(self, key: str, data: bytes) -> None:
        super().create(key, data)
        if not self.lost:
            self.lost = True
            raise Transient("connection reset")


def test_a_create_whose_reply_was_lost_has_succeeded() -> None:
    assert conditional.create(LostReply(), "k", b"mine", sleep=lambda _: None) is None


def test_the_loser_gets_the_winners_bytes() -> None:
    store = MemoryStore()
    store.put("k", b"theirs")
    assert conditional.create(store, "k", b"mine") == b"theirs"


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

    assert conditional.create(Late(), "k", b"mine", sleep=lambda _: None) == b"theirs"
