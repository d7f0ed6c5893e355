"""Drills as the service knows them: at most one at a time, with counts of outcomes per rank."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field

import msgspec

from canary_obs.errors import CanaryError
from canary_obs.hub.sweeps import RankKey
from canary_obs.records import DrillReport
from canary_obs.slot_facts import DrillFinding
from canary_obs.vocabulary import DrillOutcome


class DrillInProgress(CanaryError):
    """A drill is running."""

    def __init__(self) -> None:
        super().__init__("a drill is under way; wait for its answer")


class RankDrill(msgspec.Struct, frozen=True, kw_only=True):
    """How a drill ended on one rank."""

    key: RankKey
    finding: DrillFinding


class DrillRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A drill that has ended."""

    id: str
    requested_ns: int
    ended_ns: int
    ranks: tuple[RankDrill, ...]


@dataclass(slots=True, kw_only=True)
class DrillCount:
    """One rank's drills since the service started."""

    outcomes: dict[DrillOutcome, int] = field(default_factory=dict)
    detected_ns: int | None = None  # when the latest one was


@dataclass(slots=True, kw_only=True)
class _Running:
    id: str
    requested_ns: int
    until: float
    expected: set[RankKey] | None = None  # None = not known yet
    findings: dict[RankKey, DrillFinding] = field(default_factory=dict)
    end: Future[DrillRecord] = field(default_factory=Future)


class DrillStore:
    """Thread-safe."""

    def __init__(self, wall_ns: Callable[[], int] = time.time_ns) -> None:
        self._wall_ns = wall_ns
        self._lock = threading.Lock()
        self._running: _Running | None = None
        self._counts: dict[RankKey, DrillCount] = {}

    def begin(self, seconds: float) -> tuple[str, Future[DrillRecord]]:
        """Open a drill of at most so long; returns its id and its end. Raises DrillInProgress."""
        with self._lock:
            now = time.monotonic()
            if self._running is not None:
                if now < self._running.until:
                    raise DrillInProgress
                self._finish(self._running)
            running = _Running(id=uuid.uuid4().hex, requested_ns=self._wall_ns(), until=now + seconds)
            self._running = running
            return running.id, running.end

    def set_expected_ranks(self, drill_id: str, ranks: Iterable[RankKey]) -> None:
        """These ranks were asked; some may have answered already."""
        with self._lock:
            running = self._named(drill_id)
            if running is not None:
                running.expected = set(ranks)
                self._settle(running)

    def record_report(self, report: DrillReport) -> None:
        """Record one rank's answer; an answer to no running drill is late, and ignored."""
        with self._lock:
            running = self._named(report.finding.id)
            if running is not None:
                running.findings[report.identity.key] = report.finding
                self._settle(running)

    def end(self, drill_id: str) -> None:
        """End a drill now: ranks that have not answered count as unanswered."""
        with self._lock:
            running = self._named(drill_id)
            if running is not None:
                self._finish(running)

    def counts(self) -> dict[RankKey, DrillCount]:
        """By rank; ranks without a drill are left out."""
        with self._lock:
            return {
                key: DrillCount(outcomes=dict(count.outcomes), detected_ns=count.detected_ns)
                for key, count in self._counts.items()
            }

    def _named(self, drill_id: str) -> _Running | None:
        return self._running if self._running is not None and self._running.id == drill_id else None

    def _settle(self, running: _Running) -> None:
        if running.expected is not None and running.expected <= running.findings.keys():
            self._finish(running)

    def _finish(self, running: _Running) -> None:
        self._running = None
        ended_ns = self._wall_ns()
        for key in running.expected or ():
            silent = DrillFinding(id=running.id, outcome=DrillOutcome.UNANSWERED, error="the rank was silent")
            running.findings.setdefault(key, silent)
        for key, finding in running.findings.items():
            count = self._counts.setdefault(key, DrillCount())
            count.outcomes[finding.outcome] = count.outcomes.get(finding.outcome, 0) + 1
            if finding.outcome is DrillOutcome.DETECTED:
                count.detected_ns = ended_ns
        ranks = tuple(
            RankDrill(key=key, finding=finding) for key, finding in sorted(running.findings.items())
        )
        if running.end.set_running_or_notify_cancel():
            record = DrillRecord(
                id=running.id, requested_ns=running.requested_ns, ended_ns=ended_ns, ranks=ranks
            )
            running.end.set_result(record)
