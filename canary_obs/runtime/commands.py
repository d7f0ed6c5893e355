"""Executes the service's commands on the engine thread."""

from __future__ import annotations

from collections.abc import Iterable

from canary_obs.records import (
    Acknowledge,
    CancelSweep,
    CollectEvidence,
    Command,
    Pause,
    PauseSweep,
    Ping,
    Resume,
    ResumeSweep,
    SetHealing,
    StartDrill,
    StartSweep,
)
from canary_obs.runtime.evidence.collector import EvidenceCollector
from canary_obs.runtime.healing import Healing
from canary_obs.runtime.perturb.drill import Drill
from canary_obs.runtime.report.snapshot import SnapshotSources, current_health_inputs


class CommandExecutor:
    """Maps each command to the part that carries it out."""

    def __init__(
        self, sources: SnapshotSources, evidence: EvidenceCollector, drill: Drill, healing: Healing
    ) -> None:
        self._healing = healing
        self._sources, self._run, self._sweeper = sources, sources.run, sources.sweeper
        self._evidence, self._drill = evidence, drill

    def execute(self, commands: Iterable[Command]) -> None:
        """Execute commands in order."""
        for command in commands:
            self._execute(command)

    def _execute(self, command: Command) -> None:
        match command:
            case StartSweep():
                self._sweeper.request(command, self._run.step)
            case CancelSweep():
                self._sweeper.cancel(command.id)
            case PauseSweep():
                self._sweeper.hold(command.id, paused=True)
            case ResumeSweep():
                self._sweeper.hold(command.id, paused=False)
            case CollectEvidence():
                self._evidence.request(command)
            case StartDrill():
                self._drill.start(command, self._run.step)
            case Pause():
                self._run.paused = True
            case Resume():
                self._run.paused = False
            case Acknowledge():
                self._sources.health.acknowledge(current_health_inputs(self._sources), command)
                if not command.violations_only:
                    self._sources.reporter.acknowledged()
            case SetHealing():
                if command.policy is not None:
                    self._healing.choose(command.policy)
                if command.release is not None:
                    self._healing.release(command.release or None)
            case Ping():
                if command.want_hello:
                    self._sources.reporter.introduce()
                    self._sources.taint.resend()
