"""`bucketrl status` warns before the Hugging Face limit is reached, and only where it holds."""

import argparse
from typing import Any

import pytest

from bucketrl.api.messages import LeaseCounts, RunStatus
from bucketrl.jobs import inspect_commands


def run_status(bucket: str, requests_per_minute: float) -> RunStatus:
    return RunStatus(
        run_id="demo-1", name="demo", bucket=bucket, step=3, steps=9, version=3, finished=False, reward=0.5,
        staleness_mean=0.5, staleness_max=1.0, workers_alive=64, learner_alive=True,
        leases=LeaseCounts(
            active=3, outstanding_groups=5, max_outstanding_groups=10, issued_total=9, completed_total=6,
            expired_total=0, reissued_total=1,
        ),
        rollout_tokens_per_second=812.0, steps_per_minute=1.0, store_requests={"rollout": 900},
        store_requests_per_minute=requests_per_minute, proxy_started_at="t", run_started_at="t",
        last_commit_at=None, seconds_since_commit=None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("bucket", "requests_per_minute", "warned"),
    [
        ("hf://buckets/owner/name/run", 410.0, True),
        ("hf://buckets/owner/name/run", 390.0, False),
        ("s3://bucket/run", 4000.0, False),
        ("/data/hf://", 4000.0, False),
    ],
)
def test_a_rate_near_the_limit_is_pointed_out_where_there_is_one(
    bucket: str,
    requests_per_minute: float,
    warned: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Client:
        def __init__(self, *_: Any) -> None: ...

        def run_status(self) -> RunStatus:
            return run_status(bucket, requests_per_minute)

    monkeypatch.setattr(inspect_commands, "ProxyClient", Client)
    assert inspect_commands.status(argparse.Namespace(bucket=None, proxy="http://proxy")) == 0
    text = capsys.readouterr().out
    assert f"{requests_per_minute:.0f} requests/min" in text
    assert ("WARNING" in text) == warned
    assert ("2500" in text) == warned
