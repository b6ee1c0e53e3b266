"""The FastAPI application: assembly, errors, health, pages. The routes of jobs and people are beside it."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from importlib import resources
from typing import Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.exceptions import HTTPException

from bucketrl.bucket.errors import IntegrityError, StoreError
from bucketrl.bucket.records import RunRecord
from bucketrl.bucket.store import Store
from bucketrl.proxy.auth import Tokens
from bucketrl.proxy.core import ProxyCore
from bucketrl.proxy.follower import Follower
from bucketrl.proxy.job_routes import job_routes
from bucketrl.proxy.limits import Limits, RateLimiter
from bucketrl.proxy.metrics import render
from bucketrl.proxy.people_routes import people_routes

PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def _utc_now() -> datetime:
    return datetime.now(UTC)


def create_app(
    store: Store,
    run: RunRecord,
    *,
    tokens: Tokens,
    serialise_commits: bool,
    poll_s: float = 0.25,
    clock: Callable[[], float] = time.monotonic,
    wall: Callable[[], datetime] = _utc_now,
    new_id: Callable[[], str] = lambda: uuid.uuid4().hex,
    on_failure: Callable[[BaseException], None] | None = None,
) -> FastAPI:
    """The proxy of one run. `serialise_commits` opens the log route, for stores of tier 0. `on_failure`
    hears of the defect that ended the following of the bucket. `app.state.follower` is the
    Follower, `app.state.core` the ProxyCore."""
    core = ProxyCore(store, run, clock=clock, wall=wall, new_id=new_id)
    follower = Follower(core, poll_s=poll_s)

    def followed(task: "asyncio.Task[None]") -> None:
        error = None if task.cancelled() else task.exception()
        if isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if error is not None:
            follower.trouble = f"internal error: {type(error).__name__}"
            if on_failure is not None:
                on_failure(error)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(follower.run())
        task.add_done_callback(followed)
        yield
        if not task.done():
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    app = FastAPI(
        title=f"bucketrl {run.config.name}",
        lifespan=lifespan,
        docs_url=None,  # its page loads scripts from elsewhere
        redoc_url=None,
        openapi_url=None,
    )
    app.state.follower, app.state.core = follower, core
    app.add_middleware(Limits, limiter=RateLimiter(clock))
    app.include_router(
        job_routes(core, follower, serialise_commits=serialise_commits),
        dependencies=[Depends(tokens.allow_work)],
    )
    app.include_router(people_routes(core), dependencies=[Depends(tokens.allow_read)])
    _add_open_routes(app, core, follower)
    app.add_exception_handler(HTTPException, _http_problem)
    app.add_exception_handler(RequestValidationError, _validation_problem)
    app.add_exception_handler(IntegrityError, _integrity_problem)
    app.add_exception_handler(StoreError, _store_problem)

    @app.get("/metrics", dependencies=[Depends(tokens.allow_read)])
    async def metrics() -> Response:
        return Response(render(core), media_type="text/plain; version=0.0.4")

    return app


def _add_open_routes(app: FastAPI, core: ProxyCore, follower: Follower) -> None:
    page = resources.files("bucketrl.proxy").joinpath("dashboard.html").read_text(encoding="utf-8")

    @app.get("/")
    async def dashboard() -> HTMLResponse:
        return HTMLResponse(page, headers=PAGE_HEADERS)  # static: its data calls carry the reader's token

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "alive", "run_id": core.run.run_id}

    @app.get("/readyz")
    async def readyz() -> JSONResponse:
        if follower.ready and not follower.trouble:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"error": follower.trouble or "the log has not been read yet"}, 503)


async def _http_problem(_: Request, error: Any) -> JSONResponse:
    return JSONResponse({"error": str(error.detail)}, error.status_code, headers=error.headers)


async def _validation_problem(_: Request, error: Any) -> JSONResponse:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"] if part != "body") or "body"
    return JSONResponse({"error": f"{where}: {first['msg']}"}, 422)


async def _integrity_problem(_: Request, error: Any) -> JSONResponse:
    return JSONResponse({"error": str(error)}, 422)


async def _store_problem(_: Request, error: Any) -> JSONResponse:
    return JSONResponse({"error": f"the bucket does not answer: {error}"}, 503)
