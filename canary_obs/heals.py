"""What healing did about damage, and what it may do, as plain Python structures."""

from __future__ import annotations

import msgspec

from canary_obs.vocabulary import HealAction, HealOutcome, HealPolicy, Reason


class Heal(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One action of healing. None = does not apply."""

    action: HealAction
    outcome: HealOutcome
    policy: HealPolicy  # as asked for
    group: str
    block: int | None  # the engine's number; of the damage, or released
    time_ns: int  # time.time_ns()
    request: str | None = None  # that was, or would have been, computed again or ended
    reason: Reason | None = None  # of the finding
    incident: str | None = None
    blocks: int = 0  # that left the prefix cache, or would have
    tokens: int = 0  # that a request had computed, and computes again
    forwards: int | None = None  # from the check that found it to the action
    detail: str | None = None


class HealStatus(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What healing may do on one engine now."""

    policy: HealPolicy  # as asked for
    effective: HealPolicy
    why: str | None = None  # it is a dry run, although more was asked for
    pool_blocks: int = 0  # 0 = not known yet
    quarantined: tuple[tuple[str, int], ...] = ()  # group and block
