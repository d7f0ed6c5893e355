"""One injected fault, and which violations it explains."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from canary_obs.records import Violation
from canary_obs.vocabulary import PerturbMode, Reason

_BYTES = frozenset({Reason.KV_DATA})
# The table may point to the same positions of another request, whose tokens the scheduler contradicts.
_LINKS = frozenset({Reason.CHAIN, Reason.POSITION, Reason.UNWRITTEN, Reason.TOKEN, Reason.WRITE_TOKEN})
_TOKENS = frozenset({Reason.WRITE_TOKEN, Reason.TOKEN})
_REASONS = {PerturbMode.REQ_TO_TOKEN: _LINKS, PerturbMode.NEXT_TOKEN_SWAP: _TOKENS}


class Outcome(StrEnum):
    """How an injection ended; OPEN = not yet."""

    OPEN = "open"
    DETECTED = "detected"
    MASKED = "masked"
    MISSED = "missed"


@dataclass(slots=True, kw_only=True)
class Injection:
    """One injected fault. Latencies: in steps to the violation, in ms to its arrival on the host."""

    mode: PerturbMode
    group: str
    slot: int  # the slot whose check must fail
    also: frozenset[tuple[str, int]] = frozenset()  # or one of these, each a group and a slot of it
    position: int | None = None  # of the slot
    # What follows a wrong token does not continue it, at these positions in every group.
    following: frozenset[int] = frozenset()
    detail: str = ""  # what exactly was changed, for the log
    step: int
    time_ns: int
    outcome: Outcome = Outcome.OPEN
    why: str = ""  # it was masked or missed
    latency_steps: int | None = None
    latency_ms: float | None = None
    reason: Reason | None = None

    def explains(self, violation: Violation) -> bool:
        """Whether this violation shows this injection, or what it has left behind."""
        if violation.step < self.step:
            return False
        return (
            self.detected_by(violation)
            or (violation.reason is Reason.CHAIN and violation.position in self.following)
            or self._continued_by(violation)
        )

    def _continued_by(self, violation: Violation) -> bool:
        """Whether this is of a later token of its request.

        Where the engine's digests follow its inputs, each of them continues the wrong one.
        """
        position, forwards = violation.position, violation.step - self.step
        return (
            violation.reason in _TOKENS
            and position is not None
            and any(0 <= position - first < forwards for first in self.following)
        )

    def detected_by(self, violation: Violation) -> bool:
        """Whether this violation is the detection of this injection."""
        place = violation.group, violation.slot
        return (
            violation.reason in _REASONS.get(self.mode, _BYTES)
            and (place == (self.group, self.slot) or place in self.also)
            and violation.step >= self.step
        )
