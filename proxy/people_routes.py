"""What people and tools ask: status, workers, steps, groups. JSON, made for `curl … | jq`."""

from typing import Annotated

from fastapi import APIRouter, Path, Query

from bucketrl.api.messages import GroupStatus, RunStatus, StepSummary, WorkerSummary
from bucketrl.proxy.core import STEPS_KEPT, ProxyCore
from bucketrl.proxy.status import group_status, run_status, steps_after, worker_rows


def people_routes(core: ProxyCore) -> APIRouter:
    router = APIRouter(prefix="/v1")

    @router.get("/run")
    async def run() -> RunStatus:
        return run_status(core)

    @router.get("/workers")
    async def workers() -> list[WorkerSummary]:
        return worker_rows(core)

    @router.get("/steps")
    async def steps(
        after: int = -1, limit: Annotated[int, Query(ge=1, le=STEPS_KEPT)] = STEPS_KEPT
    ) -> list[StepSummary]:
        """Committed steps above `after`, ascending; the newest `limit` of them."""
        return steps_after(core, after, limit)

    @router.get("/groups/{group_id}")
    async def group(group_id: Annotated[str, Path(pattern=r"^\d{4}-\d{8}$")]) -> GroupStatus:
        return group_status(core, group_id)

    return router
