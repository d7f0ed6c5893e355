"""What the routes share: the hub, the page of metrics, and the keys of requests already served."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

from fastapi import Request

from canary_obs.config import ServiceConfig
from canary_obs.hub.commands import NoEngine, OrderEvent, StartSweepRequest
from canary_obs.hub.drills import DrillRecord
from canary_obs.hub.hub import Hub
from canary_obs.hub.sweeps import SweepRecord
from canary_obs.records import StartDrill
from canary_obs.service.event_stream import EventStream
from canary_obs.service.problems import Problem
from canary_obs.telemetry.export_queue import ExportCounts
from canary_obs.telemetry.exposition import Exposition

KEYS_KEPT = 1024
DRILL_SECONDS = 30.0  # a rank that has not answered by then counts as unanswered


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependencies:
    """What the process around the app tells it."""

    log_dropped: Callable[[], int] = lambda: 0
    exports: Callable[[], Mapping[str, ExportCounts]] = dict
    listening: Callable[[], bool] = lambda: True
    audit: Callable[[OrderEvent], None] = lambda _order: None


@dataclass(frozen=True, slots=True, kw_only=True)
class AppContext:
    """One per app."""

    hub: Hub
    config: ServiceConfig
    event_stream: EventStream
    metrics: Exposition
    listening: Callable[[], bool]
    served: OrderedDict[str, tuple[StartSweepRequest, str]] = field(default_factory=OrderedDict)

    def start_sweep(self, wanted: StartSweepRequest, key: str | None) -> SweepRecord:
        """Start a sweep, or find the one that the same Idempotency-Key has started."""
        if key is not None and key in self.served:
            before, sweep_id = self.served[key]
            if before != wanted:
                detail = "this Idempotency-Key was used with another body; use a new key"
                raise Problem(409, "idempotency-key-reused", detail)
            if (record := self.hub.sweep(sweep_id)) is not None:
                return record
        record = self.hub.start_sweep(wanted)
        if key is not None:
            self.served[key] = (wanted, record.id)
            if len(self.served) > KEYS_KEPT:
                self.served.popitem(last=False)
        return record

    def start_drill(self) -> tuple[str, Future[DrillRecord]]:
        """Ask every live rank for a drill; returns its id and its end. Raises NoEngine or DrillInProgress."""
        drill_id, ended = self.hub.drills.begin(DRILL_SECONDS)
        try:
            asked = self.hub.order(StartDrill(id=drill_id))
        except NoEngine:
            self.hub.drills.end(drill_id)
            raise
        self.hub.drills.expect(drill_id, asked)
        return drill_id, ended


def context_of(request: Request) -> AppContext:
    """The desk of the app that serves a request."""
    context = request.app.state.context
    assert isinstance(context, AppContext)
    return context
