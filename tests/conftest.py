"""Fixtures that several folders share."""

from collections.abc import Iterator

import pytest
from tests.support.s3 import CREDENTIALS, S3Server, moto_server


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """One S3 server for the whole session; tests keep apart by prefix."""
    with moto_server() as server:
        yield server


@pytest.fixture
def s3_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
