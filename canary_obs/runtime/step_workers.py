"""The parts of one rank's runtime that do the work between forwards."""

from __future__ import annotations

from dataclasses import dataclass

from canary_obs.runtime.baselines import Baselines
from canary_obs.runtime.commands import CommandExecutor
from canary_obs.runtime.delivery import ViolationDelivery
from canary_obs.runtime.device.counter_reader import CounterReader
from canary_obs.runtime.evidence.collector import EvidenceCollector
from canary_obs.runtime.forward_account import ForwardAccount
from canary_obs.runtime.healing import Healing
from canary_obs.runtime.hit_account import HitAccount
from canary_obs.runtime.patrol.patrol import Patrol
from canary_obs.runtime.perturb.drill import Drill
from canary_obs.runtime.report.reporter import Reporter
from canary_obs.runtime.report.snapshot_builder import SnapshotBuilder
from canary_obs.runtime.report.swa_divergence import SwaReporter
from canary_obs.runtime.sweep.sweeper import Sweeper


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """The parts of the runtime that tasks call."""

    forwards: ForwardAccount
    hits: HitAccount | None  # None = prefix hits are not compared
    counter_reader: CounterReader
    baselines: Baselines
    delivery: ViolationDelivery
    sweeper: Sweeper
    patrol: Patrol
    drill: Drill
    evidence: EvidenceCollector
    healing: Healing
    swa: SwaReporter
    snapshots: SnapshotBuilder
    reporter: Reporter
    commands: CommandExecutor
