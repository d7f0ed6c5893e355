"""/canary/events: state changes, violations, incidents and sweeps as server-sent events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Annotated

import msgspec
from fastapi import APIRouter, Header, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from canary_obs.service.auth import signed_in_of
from canary_obs.service.context import context_of
from canary_obs.service.event_stream import POLL_SECONDS, EventStream, StreamEvent, dropped
from canary_obs.service.problems import Problem
from canary_obs.service.route_policy import TokenScope, requires
from canary_obs.service.schemas import ProblemDocument, documented

router = APIRouter(prefix="/canary", tags=["events"])

STREAMS_MAX = 32
RETRY_MS = 2000
MEDIA_TYPE = "text/event-stream"

LastEventId = Annotated[str | None, Header(max_length=128)]


@router.get(
    "/events",
    openapi_extra=requires(TokenScope.READ),
    response_class=StreamingResponse,
    responses={200: {"content": {MEDIA_TYPE: {}}}, **documented(ProblemDocument, 422, 503)},
)
async def events(request: Request, last_event_id: LastEventId = None) -> Response:
    """Events state (StateChange), violation (ViolationEvent), incident_opened and incident_closed
    (IncidentSummary), tainted (Taint), heal (HealEvent), sweep_begun and sweep_ended (SweepRecord),
    sweep_progress (SweepAdvance), dropped (Dropped). Last-Event-ID resumes."""
    context = context_of(request)
    if context.event_stream.open_streams >= STREAMS_MAX:
        raise Problem(503, "too-many-streams", f"{STREAMS_MAX} streams are open; close one, or poll instead")
    heartbeat_seconds = context.config.events_heartbeat_seconds
    frames = _frames(context.event_stream, last_event_id, heartbeat_seconds, signed_in_of(request).lasts)
    return _EventResponse(context.event_stream, frames)


class _EventResponse(StreamingResponse):
    """A stream that counts as open from the decision to serve it, not from its first frame on."""

    def __init__(self, event_stream: EventStream, frames: AsyncIterator[str]) -> None:
        # Keeps nginx from buffering, which would delay events.
        super().__init__(frames, media_type=MEDIA_TYPE, headers={"X-Accel-Buffering": "no"})
        self._event_stream = event_stream
        event_stream.open_streams += 1

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._event_stream.open_streams -= 1


async def _frames(
    event_stream: EventStream,
    last_event_id: str | None,
    heartbeat_seconds: float,
    allowed: Callable[[], bool],
) -> AsyncIterator[str]:
    """Frames until the service stops, or the caller's session has ended."""
    event_stream.poll()
    position, first = _start(event_stream, last_event_id)
    frame = _frame(event_stream, first, position) if first else ""
    yield f"retry: {RETRY_MS}\n\n{frame}"
    sent_at = time.monotonic()
    while not event_stream.closed and allowed():
        for event in event_stream.after(position):
            position = event.number or position
            yield _frame(event_stream, event, position if event.number else None)
            sent_at = time.monotonic()
        if time.monotonic() - sent_at >= heartbeat_seconds:
            yield ": heartbeat\n\n"
            sent_at = time.monotonic()
        await asyncio.sleep(POLL_SECONDS)
        event_stream.poll()


def _start(event_stream: EventStream, last_event_id: str | None) -> tuple[int, StreamEvent | None]:
    """Number after which a stream continues, and the event that it begins with."""
    if last_event_id is None:
        return event_stream.last_number, event_stream.current_state()
    epoch, _, number = last_event_id.partition("-")
    if epoch == event_stream.epoch and number.isdecimal() and int(number) <= event_stream.last_number:
        return int(number), None
    return 0, dropped(None)


def _frame(event_stream: EventStream, event: StreamEvent, number: int | None) -> str:
    event_id = "" if number is None else f"id: {event_stream.epoch}-{number}\n"
    return f"{event_id}event: {event.kind.value}\ndata: {msgspec.json.encode(event.data).decode()}\n\n"
