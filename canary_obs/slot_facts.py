"""What can be told of one slot: its record beside its bytes, its history, the word that changed."""

from __future__ import annotations

import msgspec

from canary_obs.vocabulary import DrillOutcome, Part, Phase, Plane, Reason, SlotEventKind, SlotState


class SlotEvent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One event of a slot's history; `requests` ran in that step, where it is still known."""

    kind: SlotEventKind
    step: int
    requests: tuple[str, ...] = ()


class SlotFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A slot's record beside its bytes. Fingerprints are hex words; token and chain None when redacted."""

    slot: int
    state: SlotState
    position: int
    recorded: dict[Part, str]
    found: dict[Part, str]  # of the bytes as they are now; no parts = no bytes are covered
    token: int | None = None
    chain: str | None = None

    @property
    def intact(self) -> bool | None:
        """Whether the bytes hash to what was recorded; None = nothing to compare."""
        return self.recorded == self.found if self.state is SlotState.COMPLETE and self.found else None


class ChangedWord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The single 32-bit word whose change explains a fingerprint's difference. Indices are the model's."""

    part: Part
    plane: Plane = Plane.DATA
    layer: int
    head: int
    element: int  # of the head, the first one that differs
    dtype: str  # of the engine's tensor; uint8 = not told, elements are bytes
    word: int  # of the layer's plane, counted over all heads
    original: str | None  # hex, as recorded; None = the slot was written again before it could be read
    current: str | None


class DrillFinding(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What became of a fault that one rank planted in a slot nobody uses. None = does not apply."""

    id: str
    outcome: DrillOutcome
    error: str | None = None  # why it was missed or refused
    group: str | None = None
    slot: int | None = None
    phase: Phase | None = None  # of the check that saw it
    reason: Reason | None = None
    latency_steps: int | None = None  # from planting to the check
    latency_ms: float | None = None  # from planting to the host seeing it
