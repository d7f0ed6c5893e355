"""Commands of the service to an engine, as plain Python structures."""

from __future__ import annotations

import msgspec

from canary_obs.vocabulary import HealPolicy


class _Struct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class StartSweep(_Struct, frozen=True, kw_only=True, tag="start_sweep"):
    """Start a sweep; answered with SweepReports that carry its id."""

    id: str
    groups: tuple[str, ...] = ()  # empty = all
    data: bool = True  # compare bytes too, not only links
    unlocked_only: bool = False
    swa_resident_only: bool = False  # only tokens that have a slot in the sliding-window group
    used_only: bool = False  # only slots that running requests use
    request: str | None = None  # only slots of this running request, by the name that violations give it
    first_slot: int | None = None
    last_slot: int | None = None
    budget_ms: float | None = None  # per engine step; None = the engine's sweep_budget_ms

    @property
    def selects(self) -> bool:
        """Whether some of the cached slots are left out."""
        bounds = (self.request, self.first_slot, self.last_slot)
        return (
            self.unlocked_only
            or self.swa_resident_only
            or self.used_only
            or any(bound is not None for bound in bounds)
        )


class CancelSweep(_Struct, frozen=True, kw_only=True, tag="cancel_sweep"):
    """Stop a sweep; answered with a SweepReport whose status is CANCELLED."""

    id: str


class PauseSweep(_Struct, frozen=True, kw_only=True, tag="pause_sweep"):
    """Hold a sweep until ResumeSweep; everything else continues."""

    id: str


class ResumeSweep(_Struct, frozen=True, kw_only=True, tag="resume_sweep"):
    """Undo PauseSweep."""

    id: str


class CollectEvidence(_Struct, frozen=True, kw_only=True, tag="collect_evidence"):
    """Read a slot; answered with Evidence, or not at all while too many requests are queued."""

    incident: str
    group: str
    slot: int


class StartDrill(_Struct, frozen=True, kw_only=True, tag="start_drill"):
    """Inject a fault into a reserved slot and check it; answered with a DrillReport."""

    id: str


class Pause(_Struct, frozen=True, kw_only=True, tag="pause"):
    """Stop sweeps and patrol until Resume; checks around forwards continue."""


class Resume(_Struct, frozen=True, kw_only=True, tag="resume"):
    """Undo Pause."""


class Acknowledge(_Struct, frozen=True, kw_only=True, tag="acknowledge"):
    """Ignore what the sender has seen in later verdicts: the state may become OK again.

    Each count is since attach, as a snapshot reported it; None = all up to now.
    """

    violations: int | None = None
    faults: int | None = None
    events_dropped: int | None = None
    messages_dropped: int | None = None
    violations_only: bool = False  # one incident was acknowledged: nothing but violations was seen
    undo: bool = False  # with violations_only: no more than `violations` are acknowledged


class SetHealing(_Struct, frozen=True, kw_only=True, tag="set_healing"):
    """Follow another healing policy, or bring quarantined blocks back. None = leave it as it is."""

    policy: HealPolicy | None = None
    release: tuple[int, ...] | None = None  # the engine's block numbers; () = all


class Ping(_Struct, frozen=True, kw_only=True, tag="ping"):
    """Keep-alive of the service, at least once a second. `want_hello` asks for a Hello."""

    want_hello: bool = False


Command = (
    StartSweep
    | CancelSweep
    | PauseSweep
    | ResumeSweep
    | CollectEvidence
    | StartDrill
    | Pause
    | Resume
    | Acknowledge
    | SetHealing
    | Ping
)
