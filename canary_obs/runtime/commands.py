"""What the service may order, and what the canary then does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from canary_obs.records import (
    Acknowledge,
    CancelSweep,
    CollectEvidence,
    Command,
    Pause,
    Ping,
    Resume,
    StartDrill,
    StartSweep,
)
from canary_obs.runtime.report.snapshot import current_health_inputs

if TYPE_CHECKING:
    from canary_obs.runtime.canary import CanaryRuntime


def execute_commands(canary: CanaryRuntime, commands: Iterable[Command]) -> None:
    """Carry out commands."""
    for command in commands:
        _execute(canary, command)


def _execute(canary: CanaryRuntime, command: Command) -> None:
    match command:
        case StartSweep():
            canary.sweeper.demand(command, canary.step)
        case CancelSweep():
            canary.sweeper.cancel(command.id)
        case CollectEvidence():
            canary.evidence.demand(command)
        case StartDrill():
            canary.drill.demand(command, canary.step)
        case Pause():
            canary.paused = True
        case Resume():
            canary.paused = False
        case Acknowledge():
            canary.health.acknowledge(current_health_inputs(canary))
        case Ping():
            if command.want_hello:
                canary.reporter.hello()
