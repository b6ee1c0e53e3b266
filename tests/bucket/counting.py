"""A store that remembers what was asked of it."""

from typing import Any

from bucketrl.bucket.store import Store


class CountingStore:
    """Delegates; `calls` are (operation, key or prefix)."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.calls: list[tuple[str, str]] = []

    def __getattr__(self, name: str) -> Any:
        def call(key: str, *rest: Any) -> Any:
            self.calls.append((name, key))
            return getattr(self._store, name)(key, *rest)

        return call
