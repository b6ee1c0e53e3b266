from uuid import uuid4

import pytest

from bucketrl.bucket.store import Store
from bucketrl.bucket.stores import open_store


@pytest.fixture
def memory() -> Store:
    """An empty in-memory store of this test's own."""
    return open_store(f"memory://{uuid4().hex}")
