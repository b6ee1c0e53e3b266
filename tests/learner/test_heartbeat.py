"""What the proxy hears from the learner, and that the learner does not depend on it."""

import threading
import time
from collections.abc import Callable

import pytest

from bucketrl.api.client import ProxyRefused, ProxyUnavailable
from bucketrl.api.messages import Heartbeat, HeartbeatReply, LearnerState
from bucketrl.bucket.errors import UserError
from bucketrl.learner.heartbeat import Heartbeats


class Proxy:
    """Answers heartbeats as told; can be waited on."""

    def __init__(self, answer: Callable[[], HeartbeatReply] | None = None) -> None:
        self.answer = answer or (lambda: HeartbeatReply(version=0, finished=False))
        self.states: list[LearnerState] = []
        self._arrived = threading.Condition()

    def heartbeat(self, beat: Heartbeat) -> HeartbeatReply:
        reply = self.answer()
        with self._arrived:
            assert isinstance(beat.state, LearnerState)
            self.states.append(beat.state)
            self._arrived.notify_all()
        return reply

    def wait_for(self, condition: Callable[[LearnerState], bool]) -> None:
        with self._arrived:
            assert self._arrived.wait_for(lambda: any(map(condition, self.states)), timeout=10)


def beats(
    proxy: Proxy | None, *, interval_s: float = 60.0, on_drain: Callable[[], None] = lambda: None
) -> Heartbeats:
    return Heartbeats(proxy, "learner-0", on_drain=on_drain, interval_s=interval_s, min_gap_s=0.01)


def unavailable() -> HeartbeatReply:
    raise ProxyUnavailable("connection refused")


def test_a_new_phase_and_new_skips_are_told_at_once() -> None:
    proxy = Proxy()
    with beats(proxy) as heartbeats:
        heartbeats.update(phase="waiting", epoch=3)
        proxy.wait_for(lambda state: state.phase == "waiting" and state.epoch == 3)
        heartbeats.update(pending_skips=(4, 7))
        proxy.wait_for(lambda state: state.pending_skips == (4, 7))
    assert proxy.states[0].phase == "starting"


def test_state_is_repeated_at_the_interval() -> None:
    proxy = Proxy()
    with beats(proxy, interval_s=0.03):
        deadline = time.monotonic() + 10
        while len(proxy.states) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert len(proxy.states) >= 4


def test_the_last_phase_is_told_before_the_end() -> None:
    proxy = Proxy()
    with beats(proxy) as heartbeats:
        heartbeats.update(phase="finished")
    assert proxy.states[-1].phase == "finished"


def test_quarantined_attempts_are_told_until_a_heartbeat_has_arrived_and_then_no_more() -> None:
    proxy = Proxy()
    with beats(proxy) as heartbeats:
        proxy.answer = unavailable
        heartbeats.quarantined("0000-00000001", "worker-0-1")
        time.sleep(0.05)
        proxy.answer = lambda: HeartbeatReply(version=0, finished=False)
        heartbeats.update(phase="training")
        proxy.wait_for(lambda state: [one.attempt for one in state.quarantined] == ["worker-0-1"])
        heartbeats.update(phase="publishing")
        proxy.wait_for(lambda state: state.phase == "publishing")
    assert sum(bool(state.quarantined) for state in proxy.states) == 1


def test_an_absent_proxy_is_noted_once_and_again_when_it_answers(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING")
    proxy = Proxy(unavailable)
    with beats(proxy) as heartbeats:
        for phase in ("waiting", "training", "waiting"):
            heartbeats.update(phase=phase)
            time.sleep(0.05)
        proxy.answer = lambda: HeartbeatReply(version=0, finished=False)
        heartbeats.update(phase="training")
        proxy.wait_for(lambda state: state.phase == "training")
    assert [record.message for record in caplog.records if "does not answer" in record.message] != []
    assert len(caplog.records) == 2


def test_a_refusal_at_the_start_is_the_users_error() -> None:
    def refuse() -> HeartbeatReply:
        raise ProxyRefused(401, "wrong token")

    with pytest.raises(UserError, match=r"wrong token; set BUCKETRL_WORKER_TOKEN"), beats(Proxy(refuse)):
        pytest.fail("it must not begin")


def test_a_drain_directive_is_passed_on() -> None:
    drained = threading.Event()
    proxy = Proxy(lambda: HeartbeatReply(version=0, finished=False, directives=("drain",)))
    with beats(proxy, on_drain=drained.set):
        pass
    assert drained.is_set()


def test_without_a_proxy_the_state_is_kept() -> None:
    with beats(None) as heartbeats:
        heartbeats.update(phase="training", step=4)
        assert (heartbeats.state.phase, heartbeats.state.step) == ("training", 4)


def test_a_commit_is_told_at_once_with_what_was_asked_of_the_bucket() -> None:
    proxy = Proxy()
    asked = iter(range(100))
    heartbeats = Heartbeats(
        proxy,
        "learner-0",
        on_drain=lambda: None,
        store_requests=lambda: next(asked),
        interval_s=60,
        min_gap_s=0.01,
    )
    with heartbeats:
        heartbeats.update(log_seq=7)
        proxy.wait_for(lambda state: state.log_seq == 7)
    assert [state.store_requests for state in proxy.states] == list(range(len(proxy.states)))
