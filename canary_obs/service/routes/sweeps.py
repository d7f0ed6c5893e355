"""/canary/sweep and /canary/sweeps: start, list, show and cancel sweeps."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Body, Header, Path, Query, Request, Response

from canary_obs.hub.sweep_records import SweepRecord
from canary_obs.service.context import context_of
from canary_obs.service.problems import Problem
from canary_obs.service.query_parameters import AS_DECLARED
from canary_obs.service.request_bodies import SweepBody
from canary_obs.service.route_policy import TokenScope, requires
from canary_obs.service.schemas import SweepList, SweepQuery, SweepsQuery, documented, reply
from canary_obs.service.traceparent import TraceParent, valid_or_none

router = APIRouter(prefix="/canary", tags=["sweeps"])

SweepId = Annotated[str, Path(min_length=1, max_length=128)]
IdempotencyKey = Annotated[str | None, Header(min_length=1, max_length=128)]


@router.post(
    "/sweep",
    openapi_extra=requires(TokenScope.OPERATE),
    status_code=202,
    responses=documented(SweepRecord, 200, 202, 404, 409, 422, 503),
    dependencies=AS_DECLARED,
)
async def start_sweep(
    request: Request,
    query: Annotated[SweepQuery, Query()],
    body: Annotated[SweepBody | None, Body()] = None,
    idempotency_key: IdempotencyKey = None,
    traceparent: TraceParent = None,
) -> Response:
    """Start a sweep: 202 with its id. With wait=true 200 with its result, or 202 when it takes too long.

    With wait=true 409 at once while a rank is paused. The sweep's span is a child of `traceparent`'s; one
    that is not valid is left out.
    """
    context, sweep = context_of(request), (body or SweepBody()).wanted
    caller = valid_or_none(traceparent)
    record = context.start_sweep(sweep, idempotency_key, wait=query.wait == "true", traceparent=caller)
    if query.wait == "true" and record.begun_ns is not None:
        record = await context.sweep_result(record)
    status = 200 if query.wait == "true" and record.ended_ns is not None else 202
    return reply(record, status, {"Location": f"/canary/sweeps/{record.id}"})


@router.get(
    "/sweeps",
    openapi_extra=requires(TokenScope.READ),
    responses=documented(SweepList, 200, 422),
    dependencies=AS_DECLARED,
)
async def list_sweeps(request: Request, query: Annotated[SweepsQuery, Query()]) -> Response:
    """Kept sweeps, newest first, with every trigger: demand, interval and idle."""
    return reply(SweepList(sweeps=tuple(context_of(request).hub.sweeps()[: query.limit])))


@router.get(
    "/sweeps/{sweep_id}",
    openapi_extra=requires(TokenScope.READ),
    responses=documented(SweepRecord, 200, 404, 422),
)
async def show_sweep(request: Request, sweep_id: SweepId) -> Response:
    """One sweep with the progress of every rank."""
    return reply(_found(context_of(request).hub.sweep(sweep_id), sweep_id))


@router.delete(
    "/sweeps/{sweep_id}",
    openapi_extra=requires(TokenScope.OPERATE),
    status_code=202,
    responses=documented(SweepRecord, 200, 202, 404, 422),
    dependencies=AS_DECLARED,
)
async def cancel_sweep(request: Request, sweep_id: SweepId) -> Response:
    """Ask the ranks to stop a sweep: 202. A sweep that has already ended is returned unchanged: 200."""
    record = _found(context_of(request).hub.sweep_control.cancel(sweep_id), sweep_id)
    return _changed(record)


@router.post(
    "/sweeps/{sweep_id}/pause",
    openapi_extra=requires(TokenScope.OPERATE),
    status_code=202,
    responses=documented(SweepRecord, 200, 202, 404, 422),
    dependencies=AS_DECLARED,
)
async def pause_sweep(request: Request, sweep_id: SweepId) -> Response:
    """Hold one sweep on its ranks: 202; other checks go on. One that has ended is unchanged: 200."""
    return _changed(_found(context_of(request).hub.sweep_control.hold(sweep_id, paused=True), sweep_id))


@router.post(
    "/sweeps/{sweep_id}/resume",
    openapi_extra=requires(TokenScope.OPERATE),
    status_code=202,
    responses=documented(SweepRecord, 200, 202, 404, 422),
    dependencies=AS_DECLARED,
)
async def resume_sweep(request: Request, sweep_id: SweepId) -> Response:
    """Let a paused sweep go on: 202. A sweep that has already ended is returned unchanged: 200."""
    return _changed(_found(context_of(request).hub.sweep_control.hold(sweep_id, paused=False), sweep_id))


def _changed(record: SweepRecord) -> Response:
    return reply(record, 202 if record.ended_ns is None else 200)


def _found(record: SweepRecord | None, sweep_id: str) -> SweepRecord:
    if record is None:
        raise Problem(404, "no-such-sweep", f"no sweep {sweep_id!r} is kept; GET /canary/sweeps lists them")
    return record
