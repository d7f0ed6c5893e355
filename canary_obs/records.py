"""Messages from an engine to the service, and with them the commands back, as plain Python structures."""

from __future__ import annotations

import msgspec

from canary_obs.check_progress import (
    PatrolProgress as PatrolProgress,
    SweepProgress as SweepProgress,
    SweepShare as SweepShare,
)
from canary_obs.commands import (
    Acknowledge as Acknowledge,
    CancelSweep as CancelSweep,
    CollectEvidence as CollectEvidence,
    Command as Command,
    Pause as Pause,
    PauseSweep as PauseSweep,
    Ping as Ping,
    Resume as Resume,
    ResumeSweep as ResumeSweep,
    SetHealing as SetHealing,
    StartDrill as StartDrill,
    StartSweep as StartSweep,
)
from canary_obs.devices.identity import GpuIdentity
from canary_obs.heals import Heal, HealStatus
from canary_obs.injection_counts import PerturbCount
from canary_obs.slot_facts import ChangedWord, DrillFinding, SlotEvent, SlotFacts, TaintedRequest
from canary_obs.vocabulary import (
    Cause,
    Completeness,
    GoodCheck,
    HealAction,
    HealOutcome,
    Mode,
    Part,
    PerturbMode,
    Phase,
    Reason,
    State,
    Trigger,
)

RankKey = tuple[str, str, int]  # engine, instance, rank


class _Struct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Identity(_Struct, frozen=True, kw_only=True):
    """Identifies a rank. A restart keeps (engine, instance, rank) and changes started_ns."""

    engine: str
    instance: str
    rank: int
    started_ns: int  # time.time_ns() at attach
    pid: int
    device: str

    @property
    def key(self) -> RankKey:
        """(engine, instance, rank): stable across restarts."""
        return self.engine, self.instance, self.rank


class GroupInfo(_Struct, frozen=True, kw_only=True):
    """One group, as shown by the adapter at attach."""

    name: str
    layers: int
    parts: tuple[Part, ...]
    slots: int
    slot_bytes: int  # KV bytes of one slot over all layers and parts
    protected_slot_bytes: int  # of those, the bytes a fingerprint covers


class GroupCounters(_Struct, frozen=True, kw_only=True):
    """Monotonic counters of one group since attach, in slots unless noted."""

    runs: dict[Phase, int]  # completed check launches
    verified: dict[Phase, int]  # slots whose record was checked
    hashed: dict[Phase, int]  # slots whose bytes were compared
    unverified: dict[Cause, int]
    written: int
    completed: int
    violations: dict[Phase, dict[Reason, int]]  # findings: the same damage seen again is not counted here
    redetections: dict[Reason, int]  # failed checks of findings that were counted before
    loads_compared: int = 0  # slots of loads that were compared with the records of what was sent
    loads_left_out: int = 0  # slots of loads of which no record was known


class PipelineStatus(_Struct, frozen=True, kw_only=True):
    """State of one rank's device-to-host copies."""

    lag_steps: int
    lag_seconds: float
    skipped: int


class SwaDivergence(_Struct, frozen=True, kw_only=True):
    """Sliding-window groups compared with full ones; of several groups the minimum."""

    step: int
    verified_full: int  # slots verified at head and tail since attach
    verified_swa: int
    index_divergence: int  # live tokens whose slots in the two groups have different numbers
    out_of_window: int  # live tokens of the full group without a slot in the sliding-window group
    full_groups: tuple[str, ...]
    swa_groups: tuple[str, ...]


class Snapshot(_Struct, frozen=True, kw_only=True, tag="snapshot"):
    """The whole state of a rank at one moment."""

    identity: Identity
    sequence: int
    time_ns: int
    mode: Mode
    backend: str
    step: int
    state: State
    state_reasons: tuple[str, ...]
    groups: dict[str, GroupCounters]
    sweep_passes: dict[Trigger, int]
    last_sweep_ns: int | None  # end of the last PASSED sweep, time.time_ns()
    sweep: SweepProgress | None  # running, else the last
    patrol: PatrolProgress | None  # None = patrol off
    pipeline: PipelineStatus
    overhead_seconds: dict[str, float]  # by hook: head, tail, sweep, patrol, pump, adapter, scheduler
    step_seconds: float  # engine time between step starts, summed
    observer_faults: dict[str, int]  # exceptions caught, by ObserverPart
    violation_events_dropped: int
    messages_dropped: int
    perturbations: dict[PerturbMode, PerturbCount]
    paused: bool
    kernels_stalled: dict[str, tuple[Phase, ...]] | None = None  # by group; None = not reported
    swa_divergence: SwaDivergence | None = None  # None = no sliding-window group, or no report yet
    forwards: dict[str, int] | None = None  # with tokens, by group, as the engine counts; None = unknown
    forwards_checked: dict[str, int] | None = None  # of those, the ones whose checks were launched
    monotonic_ns: int | None = None  # time.monotonic_ns() when it was taken; None = not reported
    healing: HealStatus | None = None  # None = not reported
    heals: dict[HealAction, dict[HealOutcome, int]] = {}  # actions since attach
    boot_id: str | None = None  # of the host's kernel; on one host, monotonic clocks agree
    tainted_requests: dict[str, dict[Completeness, int]] | None = None  # that read damage, by group
    taint_unknown: dict[str, int] | None = None  # damages whose readers are not all known, by group
    captures: dict[str, int] | None = None  # as one launch: done, failed; None = never
    replays: int | None = None  # of those launches


class Hello(_Struct, frozen=True, kw_only=True, tag="hello"):
    """First message of a rank, repeated on request: its groups, settings and versions."""

    identity: Identity
    mode: Mode
    backend: str
    engine_version: str
    groups: tuple[GroupInfo, ...]
    record_bytes: int
    settings: dict[str, str]  # secrets masked
    versions: dict[str, str]
    expected_ranks: tuple[int, ...] = ()  # of this engine instance, that report to the same service
    allocated_bytes: int | None = None  # of KV, as the engine says; without its word, those of the groups
    node: str | None = None
    gpu: GpuIdentity | None = None  # None = a CPU, or unknown
    model: str | None = None  # and its revision, as the engine names them


class Violation(_Struct, frozen=True, kw_only=True):
    """One failed check. `expected` and `actual` are hex words; None when redacted."""

    phase: Phase
    reason: Reason
    group: str
    part: Part | None
    step: int
    event: int  # ordinal among violations of the same group, phase and reason, from 1
    slot: int
    position: int | None
    request: str | None
    expected: str | None
    actual: str | None
    lag_steps: int
    time_ns: int  # time.time_ns() at its arrival on the host
    sweep_id: str | None = None
    slots: int = 1  # consecutive ones of one request, from `slot` on, that failed the same check of a forward
    redetection: bool = False  # of a finding that was reported before: counted, and not sent
    traceparent: str | None = None  # W3C: the span that sent `request` to the engine, where that is known
    peer: str | None = None  # found on arrival: who had sent the bytes; "unknown" = nobody says


class Violations(_Struct, frozen=True, kw_only=True, tag="violations"):
    """Violations read together."""

    identity: Identity
    rows: tuple[Violation, ...]
    incidents: tuple[str, ...] = ()  # names the rank's log gave to their incidents, the newest at the end


class SweepReport(_Struct, frozen=True, kw_only=True, tag="sweep_report"):
    """Sent when a sweep starts and when it ends."""

    identity: Identity
    progress: SweepProgress


class Evidence(_Struct, frozen=True, kw_only=True, tag="evidence"):
    """A violated slot, read when the violation reached the host, or on command."""

    identity: Identity
    incident: str
    group: str
    step: int
    time_ns: int
    prompted: bool  # True = read on command only: the slot may have changed since the violation
    slot: SlotFacts
    changed: tuple[ChangedWord, ...]  # at most one per part
    neighbours: tuple[SlotFacts, ...]  # of the same page, or nearby
    history: tuple[SlotEvent, ...]  # oldest first, bounded
    writes_known: bool  # False = history holds announcements only
    holders: tuple[str, ...]


class Tainted(_Struct, frozen=True, kw_only=True, tag="tainted"):
    """Requests that read a damaged slot, or what was computed from it, as far as they are new or changed."""

    identity: Identity
    number: int  # of the damage, counted by the rank from 1
    incident: str  # as the rank's log names it
    group: str
    slot: int
    reason: Reason
    phase: Phase
    step: int  # of the first detection
    good_step: int  # of the last good check: damage came after it
    good_check: GoodCheck
    cause: str | None  # why it is not known who read it
    completeness: Completeness
    time_ns: int
    requests: tuple[TaintedRequest, ...] = ()


class DrillReport(_Struct, frozen=True, kw_only=True, tag="drill_report"):
    """Sent when a drill ends."""

    identity: Identity
    finding: DrillFinding


class Heals(_Struct, frozen=True, kw_only=True, tag="heals"):
    """What healing did since the last message; the rank that speaks for its engine's scheduler sends it."""

    identity: Identity
    rows: tuple[Heal, ...]


class StepUnderWay(_Struct, frozen=True, kw_only=True, tag="step_under_way"):
    """Sent by another thread while the engine's thread is in a step that lasts: it makes no snapshots."""

    identity: Identity
    seconds: float


class Goodbye(_Struct, frozen=True, kw_only=True, tag="goodbye"):
    """Last message: the rank has detached."""

    identity: Identity
    final: Snapshot


EngineMessage = (
    Hello
    | Snapshot
    | StepUnderWay
    | Violations
    | SweepReport
    | Evidence
    | Tainted
    | DrillReport
    | Heals
    | Goodbye
)
