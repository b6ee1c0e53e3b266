"""Fixtures that several folders share."""

from collections.abc import Iterator

import pytest
from hypothesis import settings
from tests.support.s3 import CREDENTIALS, S3Server, ministack_server, moto_server, rclone_server

# How long an example takes depends on what else the machine does.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """moto; one server for the whole session, as each of these: tests keep apart by prefix."""
    with moto_server() as server:
        yield server


@pytest.fixture(scope="session")
def ministack() -> Iterator[S3Server]:
    with ministack_server() as server:
        yield server


@pytest.fixture(scope="session")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """Checks signatures, ignores conditions."""
    with rclone_server(tmp_path_factory.mktemp("rclone")) as server:
        yield server


@pytest.fixture
def s3_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
