"""Unconditional puts whose outcome nobody knows: one may still land, and replace what was put after it."""

STRAY_PUT_S = 31.0
"""How long after its sender has died or given it up a put may land (`bucket_layout.md` section 3)."""


class StrayPuts:
    """Of log records, at tier 0. Times are monotonic seconds."""

    def __init__(self, now: float) -> None:
        # The proxy before this one may have died with any record in flight.
        self._data: bytes | None = None
        self._until = now + STRAY_PUT_S

    def failed(self, data: bytes, now: float) -> None:
        """A put of `data` raised: it may have been done, or be done later."""
        self._data = data
        self._until = now + STRAY_PUT_S

    def seconds_until_safe(self, data: bytes, now: float) -> float:
        """How long to wait before `data` is put; 0 also for the very bytes that may still land."""
        return 0.0 if data == self._data else max(0.0, self._until - now)
