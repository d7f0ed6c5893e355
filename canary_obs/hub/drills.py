"""Drills on the ranks: at most one at a time, with counts of outcomes per rank."""

from __future__ import annotations

import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field

import msgspec

from canary_obs.errors import CanaryError
from canary_obs.records import DrillReport, RankKey
from canary_obs.slot_facts import DrillFinding
from canary_obs.vocabulary import DrillOutcome

RECORDS_KEPT = 64


class DrillInProgress(CanaryError):
    """Another drill is running."""

    def __init__(self) -> None:
        super().__init__("a drill is running; wait for its result")


class RankDrill(msgspec.Struct, frozen=True, kw_only=True):
    """How a drill ended on one rank."""

    key: RankKey
    finding: DrillFinding
    reported_ns: int | None = None  # when its report arrived; None = it did not


class DrillRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A drill that has ended."""

    id: str
    requested_ns: int
    ended_ns: int
    ranks: tuple[RankDrill, ...]
    traceparent: str | None = None  # W3C: the span that asked for it


@dataclass(slots=True, kw_only=True)
class DrillCount:
    """One rank's drills since the service started."""

    outcomes: dict[DrillOutcome, int] = field(default_factory=dict)
    detected_ns: int | None = None  # when the latest one was


@dataclass(slots=True, kw_only=True)
class _RunningDrill:
    id: str
    requested_ns: int
    deadline: float  # store's clock
    expected: set[RankKey] | None = None  # None = not known yet
    traceparent: str | None = None
    findings: dict[RankKey, RankDrill] = field(default_factory=dict)
    result: Future[DrillRecord] = field(default_factory=Future)


class DrillStore:
    """The running drill, the latest RECORDS_KEPT that have ended, and counts of all. Thread-safe."""

    def __init__(
        self, *, clock: Callable[[], float] = time.monotonic, wall_ns: Callable[[], int] = time.time_ns
    ) -> None:
        self._clock, self._wall_ns = clock, wall_ns
        self._lock = threading.Lock()
        self._running: _RunningDrill | None = None
        self._ended: deque[DrillRecord] = deque(maxlen=RECORDS_KEPT)
        self._counts: dict[RankKey, DrillCount] = {}

    def start(self, seconds: float, traceparent: str | None = None) -> tuple[str, Future[DrillRecord]]:
        """Start a drill of at most `seconds`, for the span that `traceparent` (W3C) names.

        Returns id and future result. Raises DrillInProgress.
        """
        with self._lock:
            now = self._clock()
            if self._running is not None:
                if now < self._running.deadline:
                    raise DrillInProgress
                self._finish(self._running)
            drill = _RunningDrill(
                id=uuid.uuid4().hex,
                requested_ns=self._wall_ns(),
                deadline=now + seconds,
                traceparent=traceparent,
            )
            self._running = drill
            return drill.id, drill.result

    def set_expected_ranks(self, drill_id: str, ranks: Iterable[RankKey]) -> None:
        """Name the ranks that were asked to drill; some may have reported already."""
        with self._lock:
            drill = self._find(drill_id)
            if drill is not None:
                drill.expected = set(ranks)
                self._finish_if_complete(drill)

    def record_report(self, report: DrillReport) -> None:
        """Record one rank's finding. A report that does not belong to the running drill is ignored."""
        with self._lock:
            drill = self._find(report.finding.id)
            if drill is not None:
                key = report.identity.key
                drill.findings[key] = RankDrill(key=key, finding=report.finding, reported_ns=self._wall_ns())
                self._finish_if_complete(drill)

    def finish(self, drill_id: str) -> None:
        """Finish a drill now: ranks that have not reported count as unanswered."""
        with self._lock:
            drill = self._find(drill_id)
            if drill is not None:
                self._finish(drill)

    def ended(self) -> tuple[DrillRecord, ...]:
        """The latest drills that have ended, oldest first."""
        with self._lock:
            return tuple(self._ended)

    def counts(self) -> dict[RankKey, DrillCount]:
        """Counts of every rank that took part in a drill."""
        with self._lock:
            return {
                key: DrillCount(outcomes=dict(count.outcomes), detected_ns=count.detected_ns)
                for key, count in self._counts.items()
            }

    def forget(self, key: RankKey) -> None:
        """Drop the counts of a rank that is gone."""
        with self._lock:
            self._counts.pop(key, None)

    def _find(self, drill_id: str) -> _RunningDrill | None:
        return self._running if self._running is not None and self._running.id == drill_id else None

    def _finish_if_complete(self, drill: _RunningDrill) -> None:
        if drill.expected is not None and drill.expected <= drill.findings.keys():
            self._finish(drill)

    def _finish(self, drill: _RunningDrill) -> None:
        self._running = None
        ended_ns = self._wall_ns()
        for key in drill.expected or ():
            unanswered = DrillFinding(
                id=drill.id, outcome=DrillOutcome.UNANSWERED, error="the rank did not report"
            )
            drill.findings.setdefault(key, RankDrill(key=key, finding=unanswered))
        for key, found in drill.findings.items():
            finding = found.finding
            count = self._counts.setdefault(key, DrillCount())
            count.outcomes[finding.outcome] = count.outcomes.get(finding.outcome, 0) + 1
            if finding.outcome is DrillOutcome.DETECTED:
                count.detected_ns = ended_ns
        record = DrillRecord(
            id=drill.id,
            requested_ns=drill.requested_ns,
            ended_ns=ended_ns,
            ranks=tuple(drill.findings[key] for key in sorted(drill.findings)),
            traceparent=drill.traceparent,
        )
        self._ended.append(record)
        if drill.result.set_running_or_notify_cancel():
            drill.result.set_result(record)
