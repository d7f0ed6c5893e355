"""Request and response schemas; most responses are the hub's own structs as JSON."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from fastapi import Response
from pydantic import BaseModel, ConfigDict, Field

from canary_obs.heals import HealStatus
from canary_obs.hub.acknowledgements import AcknowledgementRecord
from canary_obs.hub.drills import DrillRecord
from canary_obs.hub.incidents import IncidentSummary
from canary_obs.hub.ranks import RankView
from canary_obs.hub.sweep_records import SweepRecord
from canary_obs.hub.taint_store import Taint
from canary_obs.hub.violation_store import ViolationEvent
from canary_obs.service.event_stream import Dropped, StateChange, SweepAdvance
from canary_obs.service.fleet import FleetView
from canary_obs.service.incident.report import IncidentReport
from canary_obs.service.problems import MEDIA_TYPE
from canary_obs.service.request_bodies import Name
from canary_obs.service.route_policy import SCOPE_EXTENSION, WRITE_SCOPES, TokenScope
from canary_obs.telemetry.incident_bundle import IncidentBundle
from canary_obs.vocabulary import HealAction, HealOutcome, Phase, Reason, State

_REF = "#/components/schemas/{name}"


class SweepQuery(BaseModel):
    """Query of POST /canary/sweep."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    wait: Annotated[Literal["true", "false"], Field(description="Respond when the sweep has ended.")] = (
        "false"
    )


class SweepsQuery(BaseModel):
    """Query of GET /canary/sweeps."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    limit: Annotated[int, Field(ge=1, le=256)] = 50


class IncidentsQuery(BaseModel):
    """Query of GET /canary/incidents."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    limit: Annotated[int, Field(ge=1, le=256)] = 50


class ViolationsQuery(BaseModel):
    """Query of GET /canary/violations; all filters must match."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    reason: Reason | None = None
    phase: Phase | None = None
    group: Name | None = None
    engine: Name | None = None
    instance: Name | None = None
    rank: Annotated[int | None, Field(ge=0)] = None
    after: Annotated[int | None, Field(ge=0, description="Only events with a higher number.")] = None
    before: Annotated[int | None, Field(ge=0, description="Only events with a lower number.")] = None
    limit: Annotated[int, Field(ge=1, le=1000)] = 100


class TaintedQuery(BaseModel):
    """Query of GET /canary/tainted; all filters must match."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    since: Annotated[int, Field(ge=0, description="Only changes with a higher number.")] = 0
    engine: Name | None = None
    instance: Name | None = None
    rank: Annotated[int | None, Field(ge=0)] = None
    limit: Annotated[int, Field(ge=1, le=256)] = 50


class StatusReport(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict and every rank."""

    version: str
    state: State
    reasons: tuple[str, ...]
    ranks: tuple[RankView, ...]


class SweepList(msgspec.Struct, frozen=True, kw_only=True):
    """Sweeps, newest first."""

    sweeps: tuple[SweepRecord, ...]


class ViolationPage(msgspec.Struct, frozen=True, kw_only=True):
    """Violations, newest first. `next` is the `before` of the following page; None = last page."""

    violations: tuple[ViolationEvent, ...]
    matching: int  # kept violations that match, over all pages
    evicted: int  # discarded for newer ones since the service started
    next: int | None


class TaintedPage(msgspec.Struct, frozen=True, kw_only=True):
    """Damages with the requests that read them, in the order of their latest changes.

    `next` is the `since` of the following page, and of a later poll.
    """

    tainted: tuple[Taint, ...]
    matching: int  # over all pages
    evicted: bool  # damages that changed after `since` are not kept any more
    next: int


class IncidentList(msgspec.Struct, frozen=True, kw_only=True):
    """Incidents, newest first, without their violations and evidence."""

    incidents: tuple[IncidentSummary, ...]


class Reached(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks that a command was sent to."""

    ranks: int
    reached: tuple[str, ...] = ()  # engine/instance/rank


class RankHealing(msgspec.Struct, frozen=True, kw_only=True):
    """What healing may do on a rank, and has done since the rank was first seen."""

    rank: str  # engine/instance/rank
    status: HealStatus
    actions: dict[HealAction, dict[HealOutcome, int]]


class HealingReport(msgspec.Struct, frozen=True, kw_only=True):
    """Every rank that reports on healing."""

    ranks: tuple[RankHealing, ...]


class AcknowledgementList(msgspec.Struct, frozen=True, kw_only=True):
    """Acknowledgements, newest first."""

    acknowledgements: tuple[AcknowledgementRecord, ...]


class SessionView(msgspec.Struct, frozen=True, kw_only=True):
    """Who is signed in. `token` is its name; `csrf` and `ends_ns` None = a request without a session."""

    token: str | None
    scopes: tuple[str, ...]
    csrf: str | None
    ends_ns: int | None
    drill_enabled: bool


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """Response of a probe."""

    status: Literal["ok"]


class ProblemDocument(msgspec.Struct, frozen=True, kw_only=True):
    """RFC 9457; further members depend on the type."""

    type: str
    title: str
    status: int
    detail: str
    instance: str


_RESPONSES = (
    StatusReport,
    SweepRecord,
    SweepList,
    ViolationPage,
    TaintedPage,
    Taint,
    IncidentList,
    IncidentBundle,
    DrillRecord,
    IncidentSummary,
    ViolationEvent,
    StateChange,
    SweepAdvance,
    Dropped,
    Reached,
    HealingReport,
    AcknowledgementRecord,
    AcknowledgementList,
    SessionView,
    FleetView,
    IncidentReport,
    Health,
    ProblemDocument,
)


def reply(content: msgspec.Struct, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON response."""
    return Response(msgspec.json.encode(content), status, headers, "application/json")


def documented(content: type[msgspec.Struct], *statuses: int) -> dict[int | str, dict[str, Any]]:
    """OpenAPI `responses`: `content` for statuses below 400, a problem document for the others."""
    return {status: _document(status, content if status < 400 else ProblemDocument) for status in statuses}


def _document(status: int, content: type[msgspec.Struct]) -> dict[str, Any]:
    media = MEDIA_TYPE if status >= 400 else "application/json"
    schema = {"$ref": _REF.format(name=content.__name__)}
    return {"description": (content.__doc__ or "").strip(), "content": {media: {"schema": schema}}}


def document_scopes(document: dict[str, Any], *, with_tokens: bool) -> None:
    """Add to an OpenAPI document which scope each operation requires and how it is refused."""
    if with_tokens:
        bearer = {"type": "http", "scheme": "bearer"}
        document["components"]["securitySchemes"] = {"bearer": bearer}
    for operations in document["paths"].values():
        for operation in operations.values():
            required = operation[SCOPE_EXTENSION]
            if required in list(TokenScope):
                statuses = [403] + [401] * with_tokens + [429] * (required in WRITE_SCOPES)
                refusals = documented(ProblemDocument, *statuses)
                operation["responses"] |= {str(status): response for status, response in refusals.items()}
                if with_tokens:
                    operation["security"] = [{"bearer": [required]}]


def components() -> dict[str, Any]:
    """JSON Schema of every response, for the OpenAPI document."""
    _, schemas = msgspec.json.schema_components(_RESPONSES, ref_template=_REF)
    return schemas
