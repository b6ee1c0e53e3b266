"""An S3 store behind a faulty relay, its requests counted and its waits written down, not waited."""

from collections.abc import Callable
from contextlib import ExitStack
from uuid import uuid4

from tests.support.relay import Fault, faulty_relay
from tests.support.s3 import S3Server

from bucketrl.bucket.stores.s3 import S3Store

Spoil = Callable[[str, int], Fault | None]
"""(method, how often it met this path before) -> the fault."""


class Relayed:
    def __init__(self, server: S3Server, spoil: Spoil, stack: ExitStack) -> None:
        self.requests: list[str] = []
        self.waits: list[float] = []

        def plan(method: str, path: str, before: int) -> Fault | None:
            self.requests.append(method)
            return spoil(method, before)

        relay = stack.enter_context(faulty_relay(server, plan))
        self.store = S3Store(
            relay.bucket, uuid4().hex, endpoint_url=relay.endpoint_url, sleep=self.waits.append
        )


Relay = Callable[[Spoil], Relayed]


def first(method: str, fault: Fault, times: int = 1) -> Spoil:
    return lambda met, before: fault if met == method and before < times else None


def always(method: str, fault: Fault) -> Spoil:
    return lambda met, before: fault if met == method else None
