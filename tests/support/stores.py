"""The stores that are proved: one row each, with what it must show."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import pytest
from tests.support.hub import BUCKET, StandInHub
from tests.support.relay import Answer, CutBody, Fault, LoseReply, faulty_relay
from tests.support.s3 import S3Server

from bucketrl.bucket.store import Store, Tier
from bucketrl.bucket.stores import open_store
from bucketrl.bucket.stores.generic import GenericStore
from bucketrl.bucket.stores.hf import HfStore
from bucketrl.bucket.stores.local import LocalStore
from bucketrl.bucket.stores.memory import MemoryStore
from bucketrl.bucket.stores.s3 import S3Store

Open = Callable[[], Store]
"""Opens the same run prefix once more, as another process would."""


@dataclass(frozen=True)
class Kind:
    """A store and what its probe shows."""

    name: str
    tier: Tier
    claims: Tier
    whole_puts: bool = True
    """A reader meets the old object or the new, never a part."""
    server: str | None = None
    """Fixture of the S3 server behind it."""
    relay: bool = False
    """Every key's first requests of each method meet faults."""
    mount: str = ""
    """Path below which a gateway serves its buckets."""

    def __str__(self) -> str:
        return self.name


KINDS = [
    Kind("memory", Tier.CREATE, Tier.CREATE),
    Kind("local folder", Tier.CREATE, Tier.CREATE),
    Kind("s3 moto", Tier.CREATE, Tier.CREATE, server="s3_server"),
    Kind("s3 ministack", Tier.CREATE, Tier.CREATE, server="ministack"),
    Kind("s3 ministack, faults", Tier.CREATE, Tier.CREATE, server="ministack", relay=True),
    Kind(
        "s3 as s3.hf.co is addressed, on ministack", Tier.CREATE, Tier.CREATE, server="ministack", mount="/me"
    ),
    Kind("s3 rclone", Tier.PUT, Tier.CREATE, server="rclone"),
    Kind("hf stand-in", Tier.PUT, Tier.PUT),
    Kind("fsspec memory", Tier.PUT, Tier.PUT),
    Kind("fsspec local", Tier.PUT, Tier.PUT, whole_puts=False),
]

_FAULTS: dict[str, tuple[Fault, ...]] = {
    "PUT": (LoseReply(), Answer(503, "SlowDown"), Answer(409, "ConditionalRequestConflict")),
    "GET": (CutBody(), Answer(500, "InternalError"), Answer(429, "", (("Retry-After", "0.01"),))),
    "POST": (Answer(503, "SlowDown"), LoseReply(), Answer(200, "InternalError")),
    "HEAD": (Answer(503, ""), LoseReply()),
}


def opener(kind: Kind, request: pytest.FixtureRequest, folder: Path, stack: ExitStack) -> Open:
    """Opens an empty run prefix of this kind. `stack` ends what it starts."""
    name = uuid4().hex
    if kind.server is not None:
        request.getfixturevalue("s3_credentials")
        server: S3Server = request.getfixturevalue(kind.server)
        if not (kind.relay or kind.mount):
            return lambda: open_store(server.url(name))
        relay = stack.enter_context(faulty_relay(server, _plan(kind), mount=kind.mount))
        if not kind.relay:
            return lambda: open_store(relay.url(name))
        return lambda: S3Store(relay.bucket, name, endpoint_url=relay.endpoint_url, sleep=_hurried)
    match kind.name:
        case "memory":
            return lambda: MemoryStore.named(name)
        case "local folder":
            return lambda: LocalStore(folder / "bucket")
        case "hf stand-in":
            hub = StandInHub()
            return lambda: HfStore(BUCKET, name, api=hub)
        case "fsspec memory":
            return lambda: GenericStore(f"memory://{name}/run")
        case "fsspec local":
            return lambda: GenericStore(f"local://{folder}/bucket")
    raise ValueError(kind.name)


def _plan(kind: Kind) -> Callable[[str, str, int], Fault | None]:
    def plan(method: str, path: str, before: int) -> Fault | None:
        faults = _FAULTS.get(method, ()) if kind.relay else ()
        return faults[before] if before < len(faults) else None

    return plan


def _hurried(seconds: float) -> None:
    time.sleep(min(seconds, 0.005))


def parameters(keep: Callable[[Kind], bool]) -> list[object]:
    """The rows that `keep` wants, those that need a server marked slow."""
    return [
        pytest.param(kind, id=kind.name, marks=[pytest.mark.slow] if kind.server else [])
        for kind in KINDS
        if keep(kind)
    ]
