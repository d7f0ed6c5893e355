"""Findings of damage that there is not, as healing gets those of a check."""

from __future__ import annotations

import msgspec

from canary_obs.records import Violation
from canary_obs.runtime.canary import CanaryRuntime
from canary_obs.vocabulary import Part, Phase, Reason


def add_findings(canary: CanaryRuntime, found: list[Violation]) -> None:
    """As if a check had found it in this forward."""
    found = [msgspec.structs.replace(one, step=canary.step) for one in found]
    canary.healing.found(found, (), "", canary.step)


def false_finding(block: int, slots: int) -> Violation:
    """A finding of the patrol that is none, in the first slot of a block of so many."""
    return Violation(
        phase=Phase.PATROL, reason=Reason.KV_DATA, group="full", part=Part.K, step=1, event=1,
        slot=block * slots, position=None, request=None, expected=None, actual=None, lag_steps=0, time_ns=0,
    )  # fmt: skip
