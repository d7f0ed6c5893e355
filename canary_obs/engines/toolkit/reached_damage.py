"""Damage with those whom it has reached, in an engine's terms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from canary_obs.engine_api.healing import Reached
from canary_obs.healing.damage import Damage
from canary_obs.vocabulary import Phase, Reason


class NumberedGroup(Protocol):
    """A group whose blocks an engine numbers."""

    @property
    def number(self) -> int:
        """The engine's number of the group."""

    @property
    def block_slots(self) -> int:
        """Slots per block."""


def reached_damage(
    reached: Reached, groups: Mapping[str, NumberedGroup], forward: int, incident: str,
    listed: int | None = None,
) -> Damage:  # fmt: skip
    """`forward`: number of the one that the check was of, or that was the last. `groups`: by name.

    `listed`: number of the last forward, where requests may begin before anyone acts.
    """
    violation = reached.violation
    own = groups[violation.group]
    filled = {
        (groups[name].number, slot // groups[name].block_slots)
        for name, slots in reached.filled.items()
        for slot in slots
    }
    # After a forward all bytes are compared that it has read, or none are.
    verified = violation.reason is Reason.KV_DATA and violation.phase is Phase.TAIL
    return Damage(
        group=own.number, block=violation.slot // own.block_slots, slot=violation.slot,
        offset=violation.slot % own.block_slots, reason=violation.reason, group_name=violation.group,
        good=forward - 1 if verified else None, found=forward, incident=incident,
        readers=reached.readers, filled=tuple(sorted(filled)), overwritten=reached.overwritten,
        listed=listed,
    )  # fmt: skip
