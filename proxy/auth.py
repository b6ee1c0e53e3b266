"""Bearer tokens: one for jobs, which may do everything, one for people, which may look."""

import hmac
import ipaddress
import re
from dataclasses import dataclass

from fastapi import HTTPException, Request

from bucketrl.bucket.errors import UserError

WORKER_TOKEN = "BUCKETRL_WORKER_TOKEN"
READ_TOKEN = "BUCKETRL_READ_TOKEN"
_PRINTABLE = re.compile(r"[!-~]*")


@dataclass(frozen=True, slots=True, repr=False)
class Tokens:
    """Both empty: open to everybody who can reach the port. Never printed."""

    worker: str
    read: str

    def check_for(self, host: str) -> None:
        """Raises UserError if a token cannot be sent, or if binding `host` would leave the proxy open to
        others."""
        for name, token in ((WORKER_TOKEN, self.worker), (READ_TOKEN, self.read)):
            if not _PRINTABLE.fullmatch(token):
                raise UserError(
                    f"{name}: contains white space or other characters that an HTTP header cannot carry; "
                    "use letters, digits and punctuation"
                )
        if not self.worker and not _is_loopback(host):
            raise UserError(
                f"--host {host}: reachable by others and no token is set; set {WORKER_TOKEN} "
                f"(and {READ_TOKEN} for people), or bind 127.0.0.1"
            )
        if self.read and not self.worker:
            raise UserError(f"{READ_TOKEN} is set but {WORKER_TOKEN} is not; set both")

    async def allow_read(self, request: Request) -> None:
        """FastAPI dependency of every route that only looks."""
        self._check(request, (self.worker, self.read), f"{READ_TOKEN} or {WORKER_TOKEN}")

    async def allow_work(self, request: Request) -> None:
        """FastAPI dependency of every route that changes something."""
        self._check(request, (self.worker,), WORKER_TOKEN)

    def _check(self, request: Request, accepted: tuple[str, ...], names: str) -> None:
        if not self.worker:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not given:
            raise HTTPException(
                401, f"no bearer token: send the value of {names}", headers={"www-authenticate": "Bearer"}
            )
        # Every candidate is compared, in constant time, so that timing tells nothing.
        matches = [bool(token) and hmac.compare_digest(given.encode(), token.encode()) for token in accepted]
        if not any(matches):
            raise HTTPException(403, f"wrong bearer token: this request needs the value of {names}")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
