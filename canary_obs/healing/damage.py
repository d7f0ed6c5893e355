"""Damage as those who own blocks and requests hear of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from canary_obs.records import Violation
from canary_obs.vocabulary import Phase, Reason

# What a request reads is not what its tokens are: its block list, or a block in it, belongs to other tokens.
_MISREAD = frozenset(
    {Reason.CHAIN, Reason.POSITION, Reason.TOKEN, Reason.WRITE_TOKEN, Reason.WRITE_POSITION, Reason.UNWRITTEN}
)
_LINKS = frozenset({Reason.CHAIN, Reason.POSITION})


class Damage(NamedTuple):
    """A finding, in the engine's terms. It travels from a worker to the scheduler.

    With `request`, that one read, from `position` on, something else than its own tokens: the block may be
    right, and belong to others. Without it, the block's bytes are wrong for all who hold it.
    """

    group: int  # the engine's number of the group
    block: int
    slot: int
    offset: int  # of the slot in its block
    reason: Reason
    group_name: str
    request: str | None = None  # as violations name it
    position: int = 0
    good: int | None = None  # number of the last forward that read what was right; None = unknown
    found: int = 0  # number of the last forward when it was found
    kv_intact: bool = False  # what requests compute is right all the same
    fresh: bool = False  # found after a forward, in what it has read or written
    again: bool = False  # a redetection
    incident: str = ""
    # Requests that read it, by the name that violations give them: output tokens that came before.
    readers: tuple[tuple[str, int], ...] = ()
    filled: tuple[tuple[int, int], ...] = ()  # blocks (group, number) that hold what was computed from it
    overwritten: bool = False  # the block holds something else by now
    listed: int | None = None  # number of the last forward when readers and blocks were listed


def damage_of(
    violation: Violation, group: int, size: int, forward: int, incident: str, *, drafted: bool = False
) -> Damage | None:
    """A finding as damage of a block of `size` slots in group number `group`; None = nobody reads it.

    `forward`: number of the one that the check was of, or that was the last. `drafted`: a draft model's
    group, whose proposals the target verifies.
    """
    if violation.reason is Reason.KV_DATA and violation.phase is Phase.HEAD:
        return None  # compared before it was written over
    misread = violation.reason in _MISREAD and violation.request is not None
    verified = misread or (violation.reason is Reason.KV_DATA and violation.phase is Phase.TAIL)
    position = violation.position or 0
    return Damage(
        group=group,
        block=violation.slot // size,
        slot=violation.slot,
        offset=violation.slot % size,
        reason=violation.reason,
        group_name=violation.group,
        request=violation.request if misread else None,
        # A broken link is one of two slots; other checks are of the whole prefix.
        position=max(0, position - 1) if violation.reason in _LINKS else 0,
        # The checks of each forward cover the whole prefix: what is found for the first time is new.
        good=forward - 1 if verified and not violation.redetection else None,
        found=forward,
        kv_intact=violation.reason is Reason.RECORD or drafted,
        fresh=violation.phase is Phase.TAIL,
        again=violation.redetection,
        incident=incident,
    )


def in_order(damages: Iterable[Damage]) -> list[Damage]:
    """Those that may end a request go first: one that is computed again must not escape its end.

    What was found before has had its answer, unless the limits prevented it.
    """
    return sorted(damages, key=lambda damage: damage.good is not None or damage.again)
