from collections.abc import Iterator
from contextlib import ExitStack
from uuid import uuid4

import pytest
from tests.bucket.relayed import Relay, Relayed

from bucketrl.bucket.store import Store
from bucketrl.bucket.stores import open_store


@pytest.fixture
def memory() -> Store:
    """An empty in-memory store of this test's own."""
    return open_store(f"memory://{uuid4().hex}")


@pytest.fixture
def server_name() -> str:
    """Fixture of the S3 server behind `relayed`; tests that should meet several override it."""
    return "s3_server"


@pytest.fixture
def relayed(request: pytest.FixtureRequest, server_name: str) -> Iterator[Relay]:
    server = request.getfixturevalue(server_name)
    with ExitStack() as stack:
        yield lambda spoil: Relayed(server, spoil, stack)
