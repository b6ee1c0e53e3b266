"""The FastAPI application: assembly, errors, health, pages. The routes of jobs and people are beside it."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
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


def create_app(
    store: Store,
    run: RunRecord,
    *,
    tokens: Tokens,
    serialise_commits: bool,
    poll_s: float = 0.25,
    clock: Callable[[], float] = time.monotonic,
    new_id: Callable[[], str] = lambda: uuid.uuid4().hex,
) -> FastAPI:
    """The proxy of one run. `serialise_commits` opens the log route, for stores of tier 0."""
    core = ProxyCore(store, run, clock=clock, new_id=new_id)
    follower = Follower(core, poll_s=poll_s)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(follower.run())
        yield
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    app = FastAPI(title=f"bucketrl {run.config.name}", lifespan=lifespan, docs_url=None, redoc_url=None)
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

    @app.get("/", response_class=HTMLResponse)
    async def dashboard() -> str:
        return page  # static: its data calls carry the reader's token

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "alive", "run_id": core.run.run_id}

    @app.get("/readyz")
    async def readyz() -> JSONResponse:
        if follower.ready and not follower.trouble:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"error": follower.trouble or "the log has not been read yet"}, 503)


async def _http_problem(_: Request, error: Any) -> JSONResponse:
    return JSONResponse({"error": str(error.detail)}, error.status_code)


async def _validation_problem(_: Request, error: Any) -> JSONResponse:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"] if part != "body") or "body"
    return JSONResponse({"error": f"{where}: {first['msg']}"}, 422)


async def _integrity_problem(_: Request, error: Any) -> JSONResponse:
    return JSONResponse({"error": str(error)}, 422)


async def _store_problem(_: Request, error: Any) -> JSONResponse:
    return JSONResponse({"error": f"the bucket does not answer: {error}"}, 503)
