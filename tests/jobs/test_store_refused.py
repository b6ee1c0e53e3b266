"""The real command on an S3 server that checks signatures and ignores conditions (`rclone serve s3`)."""

import subprocess
from pathlib import Path
from uuid import uuid4

import pytest
from tests.e2e.roles import cli
from tests.support.s3 import S3Server

from bucketrl.bucket import keys
from bucketrl.bucket.stores import open_store

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("s3_credentials")]

TINY = Path(__file__).parents[2] / "examples" / "tiny.toml"
WRONG_SECRET = "wrong-secret-not-to-be-shown"


def one_line(ended: subprocess.CompletedProcess[str]) -> str:
    """The line with which the command refused, and nothing but."""
    assert ended.returncode == 2, ended.stderr
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in ended.stderr
    return line


def test_a_run_may_be_created_there_but_a_learner_needs_a_proxy(rclone: S3Server) -> None:
    url = rclone.url(uuid4().hex)
    made = cli("create", str(TINY), "--bucket", url, env=rclone.environment)
    assert made.returncode == 0, made.stderr
    refused = cli("learner", "--bucket", url, "--device", "cpu", env=rclone.environment)
    assert one_line(refused) == (
        f"error: {url} cannot create objects exclusively, so the proxy must serialise commits: pass --proxy URL"
    )
    assert "create-if-absent is not exclusive here" in refused.stderr
    store = open_store(url)
    # rclone lets a racer's write appear after the deletion: left-overs of a probe are nobody's business.
    assert {info.key for info in store.list("") if not info.key.startswith(keys.PROBE_PREFIX)} == {keys.RUN}


@pytest.mark.parametrize(
    "command", [("create", str(TINY)), ("learner", "--device", "cpu")], ids=lambda c: c[0]
)
def test_wrong_credentials_are_one_line_without_them(rclone: S3Server, command: tuple[str, ...]) -> None:
    environment = rclone.environment | {"AWS_SECRET_ACCESS_KEY": WRONG_SECRET}
    url = rclone.url(uuid4().hex)
    refused = cli(*command, "--bucket", url, env=environment)
    assert one_line(refused) == (
        f"error: bucket {url}: access refused (SignatureDoesNotMatch); check the credentials and their rights"
    )
    assert WRONG_SECRET not in refused.stdout + refused.stderr
    assert list(open_store(url).list("")) == []
