"""Evidence on one slot: its record compared with its bytes, its history, the word that changed."""

from __future__ import annotations

import msgspec

from canary_obs.vocabulary import DrillOutcome, Part, Phase, Plane, Reason, SlotEventKind, SlotState

_REQUEST_LENGTH, _CUT = 256, "..."


class SlotEvent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One event of a slot's history; `requests` ran in that step, empty when no longer known."""

    kind: SlotEventKind
    step: int
    requests: tuple[str, ...] = ()


class SlotFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A slot's record and its bytes. Fingerprints are hex words; token and chain are None when redacted."""

    slot: int
    state: SlotState | None  # None = the record is damaged: its check of itself does not hold
    position: int
    recorded: dict[Part, str]
    found: dict[Part, str]  # fingerprints of the bytes as they are now; empty = no bytes are covered
    token: int | None = None
    chain: str | None = None

    @property
    def intact(self) -> bool | None:
        """Whether the bytes match the record; None = nothing to compare."""
        compared = self.state in (SlotState.COMPLETE, SlotState.BASELINE)
        return self.recorded == self.found if compared and self.found else None


class ChangedWord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The 32-bit word whose change explains a fingerprint's difference. Indices are the whole model's."""

    part: Part
    plane: Plane = Plane.DATA
    layer: int
    head: int
    element: int  # of the head, the first one that differs
    dtype: str  # of the engine's tensor; uint8 = unknown, elements are bytes
    word: int  # of the layer's plane, counted over all heads
    original: str | None  # hex, as recorded; None = the slot was written again before it could be read
    current: str | None


class TaintedRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request that read damage. Outputs are counted from 0; None = not known."""

    request: str
    running: bool
    step: int  # the first forward in which it may have read damage
    derived: bool  # not the damaged slot itself, but KV that was computed from it
    first_output: int | None  # the first token it emitted that may be wrong, at the latest
    outputs: int | None  # tokens emitted from that one on


class DrillFinding(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Result of one rank's drill. None = does not apply."""

    id: str
    outcome: DrillOutcome
    error: str | None = None  # why it was missed or refused
    group: str | None = None
    slot: int | None = None
    phase: Phase | None = None  # of the check that detected it
    reason: Reason | None = None
    latency_steps: int | None = None  # from injection to the check
    latency_ms: float | None = None  # from injection to the violation's arrival on the host


def request_name(request_id: str) -> str:
    """The id of a request as it is reported: clients choose ids, of any length and of any code points."""
    cut = _REQUEST_LENGTH - len(_CUT)
    name = request_id if len(request_id) <= _REQUEST_LENGTH else request_id[:cut] + _CUT
    return name.encode(errors="replace").decode()
