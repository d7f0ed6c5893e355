"""/canary/events: what happens, as it happens (server-sent events)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Annotated

import msgspec
from fastapi import APIRouter, Header, Request
from starlette.responses import Response, StreamingResponse

from canary_obs.service.context import context_of
from canary_obs.service.event_stream import LOOK_SECONDS, EventStream, FeedEvent, dropped
from canary_obs.service.problems import Problem
from canary_obs.service.route_policy import TokenScope, needs
from canary_obs.service.schemas import ProblemDocument, documented

router = APIRouter(prefix="/canary", tags=["events"])

STREAMS_MAX = 32
RETRY_MS = 2000
MEDIA_TYPE = "text/event-stream"

LastEventId = Annotated[str | None, Header(max_length=128)]


@router.get(
    "/events",
    openapi_extra=needs(TokenScope.READ),
    response_class=StreamingResponse,
    responses={200: {"content": {MEDIA_TYPE: {}}}, **documented(ProblemDocument, 422, 503)},
)
async def events(request: Request, last_event_id: LastEventId = None) -> Response:
    """Events state (StateChange), violation (ViolationEvent), incident_opened and incident_closed
    (IncidentSummary), sweep_begun and sweep_ended (SweepRecord), dropped (Dropped). Last-Event-ID resumes."""
    context = context_of(request)
    if context.event_stream.streams >= STREAMS_MAX:
        raise Problem(503, "too-many-streams", f"{STREAMS_MAX} streams are open; close one, or poll instead")
    content = _stream(context.event_stream, last_event_id, context.config.events_heartbeat_seconds)
    # A proxy that buffers would hold events back.
    return StreamingResponse(content, media_type=MEDIA_TYPE, headers={"X-Accel-Buffering": "no"})


async def _stream(
    event_stream: EventStream, last_event_id: str | None, heartbeat_seconds: float
) -> AsyncIterator[str]:
    with event_stream.streaming():
        event_stream.look()
        place, first = _begin(event_stream, last_event_id)
        yield (
            f"retry: {RETRY_MS}\n\n" + _text(event_stream, first, place)
            if first
            else f"retry: {RETRY_MS}\n\n"
        )
        spoke = time.monotonic()
        while not event_stream.closed:
            for event in event_stream.after(place):
                place = event.number or place
                yield _text(event_stream, event, place if event.number else None)
                spoke = time.monotonic()
            if time.monotonic() - spoke >= heartbeat_seconds:
                yield ": heartbeat\n\n"
                spoke = time.monotonic()
            await asyncio.sleep(LOOK_SECONDS)
            event_stream.look()


def _begin(event_stream: EventStream, last_event_id: str | None) -> tuple[int, FeedEvent | None]:
    if last_event_id is None:
        return event_stream.last, event_stream.verdict()
    life, _, number = last_event_id.partition("-")
    if life == event_stream.life and number.isdecimal() and int(number) <= event_stream.last:
        return int(number), None
    return 0, dropped(None)


def _text(event_stream: EventStream, event: FeedEvent, number: int | None) -> str:
    name = "" if number is None else f"id: {event_stream.life}-{number}\n"
    return f"{name}event: {event.kind.value}\ndata: {msgspec.json.encode(event.data).decode()}\n\n"
