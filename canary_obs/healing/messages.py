"""What a rank and its engine's scheduler send each other about healing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from canary_obs.healing.damage import Damage
from canary_obs.healing.guard_rail import Limits
from canary_obs.heals import Heal, HealStatus
from canary_obs.vocabulary import HealPolicy

_MOST_DAMAGES = 1024  # that wait for a step; the rest is met again by sweeps and patrol


class DamageMessage(NamedTuple):
    """From a rank, with the results of a step."""

    policy: HealPolicy
    limits: Limits
    chosen: int  # how often a policy was chosen on this rank: the same one again is a new choice
    damages: tuple[Damage, ...] = ()
    releases: tuple[int, ...] | None = None  # quarantined blocks to bring back; () = all


class HealsMessage(NamedTuple):
    """From the scheduler, with the next step."""

    heals: tuple[Heal, ...]
    status: HealStatus
    # By group number and block: what nobody caches or holds any more since.
    abandoned: tuple[tuple[int, int], ...] = ()


class DamageOutbox:
    """What waits on a rank for the results of a step."""

    def __init__(self) -> None:
        self.policy, self._limits, self._chosen = HealPolicy.OFF, Limits(0, 0.0), 0
        self._damages: list[Damage] = []
        self._releases: tuple[int, ...] | None = None
        self.due = False  # something waits

    def choose(self, policy: HealPolicy, limits: Limits) -> None:
        """The scheduler is to follow this policy."""
        if policy is HealPolicy.OFF:
            self._damages.clear()
        self.policy, self._limits, self.due = policy, limits, True
        self._chosen += 1

    def release(self, blocks: Sequence[int] | None) -> None:
        """The scheduler is to bring quarantined blocks back; None = all."""
        self._releases, self.due = tuple(blocks or ()), True

    def add(self, damage: Damage | None) -> None:
        """The scheduler is to hear of this, if it is any; beyond 1024 it is left out."""
        if damage is not None and len(self._damages) < _MOST_DAMAGES:
            self._damages.append(damage)
            self.due = True

    def empty(self) -> DamageMessage:
        """All that waits."""
        message = DamageMessage(self.policy, self._limits, self._chosen, tuple(self._damages), self._releases)
        self._damages.clear()
        self._releases, self.due = None, False
        return message
