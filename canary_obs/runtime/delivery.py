"""What happens to violations once their rows are on the host."""

from __future__ import annotations

import time

from canary_obs.errors import KVCacheViolation
from canary_obs.records import Violation
from canary_obs.runtime.device.counter_reader import CounterReader
from canary_obs.runtime.evidence.collector import EvidenceCollector
from canary_obs.runtime.faults import Faults
from canary_obs.runtime.healing import Healing
from canary_obs.runtime.patrol.patrol import Patrol
from canary_obs.runtime.perturb.injector import Injector
from canary_obs.runtime.report.finding_log import FindingLog
from canary_obs.runtime.report.reporter import Reporter
from canary_obs.runtime.run_state import RunState
from canary_obs.runtime.sweep.sweeper import Sweeper
from canary_obs.runtime.taint.report import TaintReporter
from canary_obs.vocabulary import Mode, ObserverPart, Trigger


class ViolationDelivery:
    """Passes violations to evidence, injector and service; mode `raise` raises them at the next hook."""

    def __init__(
        self,
        run: RunState,
        faults: Faults,
        counter_reader: CounterReader,
        evidence: EvidenceCollector,
        reporter: Reporter,
        injector: Injector | None,
        taint: TaintReporter,
    ) -> None:
        self.taint = taint
        self._run, self._faults, self._counter_reader = run, faults, counter_reader
        self._evidence, self._reporter, self._injector = evidence, reporter, injector
        self.healing: Healing | None = None
        self._log = FindingLog(reporter.identity)
        self.pending: list[Violation] = []  # to be raised; empty in mode `log`

    @property
    def wants_clean_copies(self) -> bool:
        """Whether `deliver` has work to do for a copy of the counters that shows no new violation."""
        return self._injector is not None or bool(self._reporter.backlog)

    def deliver(self, found: list[Violation]) -> None:
        """Act on violations that were read; `found` is empty for a copy of the counters that shows none.

        Redetections of what was reported go to mode `raise` and to the injector alone.
        """
        if self._faults.mode is Mode.RAISE:
            self.pending += [self._evidence.with_holders(violation) for violation in found]
        findings = [violation for violation in found if not violation.redetection]
        incidents = self._reporter.incidents
        if findings:
            incident = incidents.found()
        elif found:
            incidents.seen_again()
        self._reporter.send_violations(self._traced(findings))  # before anything that may fail
        if found:
            self._faults.guard(ObserverPart.TAINT, self._find_readers, found)
        if findings:
            self._log.update(findings, incident)
            # Before healing puts bytes back, or the injector restores those that it flipped.
            self._faults.guard(ObserverPart.EVIDENCE, self._evidence.collect, findings, self._run.step)
        if self.healing is not None and self.healing.active and found:
            self._faults.guard(ObserverPart.HEALING, self._heal, self.healing, found)
        if self._injector is not None:
            self._faults.guard(ObserverPart.PERTURBATION, self._match, self._injector, found)

    def _traced(self, findings: list[Violation]) -> list[Violation]:
        try:
            return [self._evidence.with_traceparent(violation) for violation in findings]
        except Exception as error:  # noqa: BLE001 - a finding is sent whatever an adapter does
            self._faults.count_fault(ObserverPart.EVIDENCE, error)
            return findings

    def _find_readers(self, found: list[Violation]) -> None:
        cured = set[int]() if self.healing is None else self.healing.put_back_before(found)
        fresh = [row for place, row in enumerate(found) if place not in cured]
        self.taint.found(fresh, self._incident, self._run.step)

    def _heal(self, healing: Healing, found: list[Violation]) -> None:
        left = healing.repair(found, self.taint.tracker.repaired, self._incident)
        healing.found(left, self.taint.reached(), self._incident, self._run.step)

    @property
    def _incident(self) -> str:
        names = self._reporter.incidents.names
        return names[-1] if names else ""

    def _match(self, injector: Injector, found: list[Violation]) -> None:
        injector.match(found, settled=self._counter_reader.settled(self._run.step))

    def drain(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for everything known on the device, and deliver it."""
        self.deliver(self._counter_reader.drain(self._run.step, timeout))
        self._faults.guard(ObserverPart.TAINT, self.taint.report)

    def check_everything(self, patrol: Patrol, sweeper: Sweeper, timeout: float) -> None:
        """Complete one patrol cycle and one sweep; wait up to `timeout` seconds for what they find."""
        deadline = time.monotonic() + timeout
        patrol.whole_cycle()
        self.drain(timeout)
        sweeper.begin_automatic(Trigger.IDLE, self._run.step)
        while sweeper.running and time.monotonic() < deadline:
            sweeper.advance(1.0, self._counter_reader.next_sequence)
            self.drain(timeout)
        if self._injector is not None:
            self._injector.finish()

    def send_evidence(self) -> None:
        """Send the evidence whose reads have arrived."""
        for evidence in self._evidence.advance(self._reporter.identity, self._run.step):
            self._reporter.send(evidence)

    def raise_pending(self) -> None:
        """Raise KVCacheViolation with the pending violations, if there are any."""
        if self.pending:
            found, self.pending = tuple(self.pending), []
            self._reporter.flush()  # the exception may end the process
            raise KVCacheViolation(found)
