"""The way from findings to those who own blocks and requests, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from canary_obs.healing.guard_rail import Limits
from canary_obs.heals import Heal, HealStatus
from canary_obs.records import Violation
from canary_obs.vocabulary import HealPolicy

Healed = Callable[[Sequence[Heal], HealStatus], None]


class Reached(NamedTuple):
    """How far one damage has come."""

    violation: Violation  # what was found last
    overwritten: bool  # its slot holds something else by now
    readers: tuple[tuple[str, int], ...]  # requests, by their names in reports: tokens that came before
    filled: Mapping[str, tuple[int, ...]]  # by group: slots that may hold what was computed from it


@runtime_checkable
class FollowsReaders(Protocol):
    """A HealingLink that can heal whom damage has reached, also when its slot is written over."""

    def reached(self, damages: Sequence[Reached], incident: str, step: int) -> None:
        """With the findings of the same forward."""


class HealingLink(Protocol):
    """Carries damage to an engine's scheduler. No method waits; all are called on the engine's thread."""

    def listen(self, healed: Healed) -> None:
        """Call `healed` whenever the scheduler has reported what it did, or what it may do."""

    def choose(self, policy: HealPolicy, limits: Limits) -> None:
        """The scheduler follows this policy from the next step on."""

    def damaged(self, found: Sequence[Violation], incident: str, step: int) -> None:
        """Findings and redetections that were read in forward number `step`, counted as violations do.

        They leave with the results of the step under way, or else of the next one.
        """

    def release(self, blocks: Sequence[int] | None) -> None:
        """Bring quarantined blocks back, by the engine's numbers; None = all."""
