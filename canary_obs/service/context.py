"""State that the routes of one app share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from fastapi import Request

from canary_obs.config import ServiceConfig
from canary_obs.devices.health import DeviceHealth
from canary_obs.hub.commands import NoEngine, StartSweepRequest
from canary_obs.hub.drills import DrillRecord
from canary_obs.hub.hub import Hub
from canary_obs.hub.rank_selection import EVERY_RANK, RankSelection, UnknownRank
from canary_obs.hub.sweep_records import SweepRecord
from canary_obs.records import StartDrill
from canary_obs.service.event_stream import EventStream
from canary_obs.service.fleet import SweepFollower
from canary_obs.service.problems import Problem
from canary_obs.service.sign_in import SignIn
from canary_obs.telemetry.audit import AuditEvent
from canary_obs.telemetry.export_queue import ExportCounts
from canary_obs.telemetry.exposition import Exposition
from canary_obs.vocabulary import State

PAUSE_CHECK_SECONDS = 0.2
DRILL_SECONDS = 30.0  # a rank that has not answered by then counts as unanswered


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependencies:
    """What the app needs from the process that runs it."""

    log_dropped: Callable[[], int] = lambda: 0  # log lines lost so far
    exports: Callable[[], Mapping[str, ExportCounts]] = dict  # by signal: traces, logs
    devices: Callable[[], tuple[DeviceHealth, ...]] = tuple  # the node's GPUs
    listening: Callable[[], bool] = lambda: True  # whether engines can connect
    audit: Callable[[AuditEvent], None] = lambda _event: None
    clock: Callable[[], float] = time.monotonic  # of sessions


@dataclass(frozen=True, slots=True, kw_only=True)
class AppContext:
    """Created once per app, by `create_app`."""

    hub: Hub
    config: ServiceConfig
    event_stream: EventStream
    metrics: Exposition
    listening: Callable[[], bool]
    sign_in: SignIn
    sweep_follower: SweepFollower
    audit: Callable[[AuditEvent], None]

    def start_sweep(
        self,
        request: StartSweepRequest,
        idempotency_key: str | None,
        *,
        wait: bool = False,
        traceparent: str | None = None,
    ) -> SweepRecord:
        """Start a sweep, or return the one that was started with the same Idempotency-Key.

        Raises Problem when the key was used for another request, or with `wait` while a rank is paused, and
        what Hub.start_sweep raises.
        """
        control = self.hub.sweep_control
        if idempotency_key is not None and (earlier := control.idempotent(idempotency_key)) is not None:
            before, record = earlier
            if before != request:
                detail = "this Idempotency-Key was used with another body; use a new key"
                raise Problem(409, "idempotency-key-reused", detail)
            if record is not None:
                return record
        if wait and (paused := self.paused_ranks(request.selection)):
            raise _paused(paused, "no sweep was started")
        record = self.hub.start_sweep(request, traceparent)
        if idempotency_key is not None:
            control.remember_key(idempotency_key, request, record.id)
        return record

    async def sweep_result(self, record: SweepRecord) -> SweepRecord:
        """The sweep at its end, or as it is at the time-out. Raises Problem once a rank of it is paused."""
        result = asyncio.wrap_future(self.hub.sweep_future(record.id))
        selection = record.request.selection if record.request else EVERY_RANK
        deadline = asyncio.get_running_loop().time() + self.config.sweep_timeout_seconds
        try:
            while (left := deadline - asyncio.get_running_loop().time()) > 0:
                await asyncio.wait({result}, timeout=min(left, PAUSE_CHECK_SECONDS))
                if result.done():
                    return result.result()
                if paused := self.paused_ranks(selection):
                    raise _paused(paused, f"sweep {record.id} goes on after it", sweep_id=record.id)
        finally:
            result.cancel()
        return self.hub.sweep(record.id) or record

    def paused_ranks(self, selection: RankSelection = EVERY_RANK) -> list[str]:
        """Live ranks whose sweeps and patrol are paused, as engine/instance/rank."""
        return [
            "/".join(map(str, rank.identity.key))
            for rank in self.hub.ranks()
            if selection.matches(rank.identity.key)
            and rank.snapshot is not None
            and rank.snapshot.paused
            and rank.state is not State.OFF
        ]

    def start_drill(
        self, selection: RankSelection = EVERY_RANK, traceparent: str | None = None
    ) -> tuple[str, Future[DrillRecord]]:
        """Start a drill on live ranks; its id and its result.

        Raises NoEngine, UnknownRank or DrillInProgress.
        """
        drill_id, result = self.hub.drills.start(DRILL_SECONDS, traceparent)
        try:
            ranks = self.hub.send_command(StartDrill(id=drill_id), selection)
        except (NoEngine, UnknownRank):
            self.hub.drills.finish(drill_id)
            raise
        self.hub.drills.set_expected_ranks(drill_id, ranks)
        return drill_id, result


def context_of(request: Request) -> AppContext:
    """The context of the app that serves a request."""
    context = request.app.state.context
    assert isinstance(context, AppContext)
    return context


def _paused(ranks: list[str], consequence: str, **extra: Any) -> Problem:
    detail = f"sweeps are paused on {', '.join(ranks)}; POST /canary/resume ends that, {consequence}"
    return Problem(409, "paused", detail, **extra)
