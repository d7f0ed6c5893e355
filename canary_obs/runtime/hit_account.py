"""Compares the prefix hits that the engine counts with those that were announced for a comparison."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from canary_obs.plurals import counted
from canary_obs.runtime.health import Health
from canary_obs.vocabulary import State


class HitAccount:
    """What was given to the comparison is counted at the hook; what the engine has, by the engine.

    That the comparison then runs is up to OwedSlots and Health: this notices that it was not asked for.
    """

    def __init__(
        self, names: tuple[str, ...], health: Health, counts: Callable[[], Mapping[str, int] | None]
    ) -> None:
        """`counts`: slots that joined requests, by group name, counted by the engine; None = it does not."""
        health.add_source(self, self.acknowledge)
        self._counts = counts
        self._given = dict.fromkeys(names, 0)
        self._missing = dict.fromkeys(names, 0)  # since the last acknowledgement
        self._surplus = dict.fromkeys(names, 0)

    def start(self) -> None:
        """Begin to compare: the engine's count is right as of now."""
        now = self._counts() or {}
        self._given = {name: now.get(name, 0) for name in self._given}

    def give(self, name: str, slots: int) -> None:
        """So many slots of a group were announced."""
        self._given[name] += slots

    def settle(self) -> None:
        """No forward is about to begin: everything that the engine counted should have been announced."""
        counts = self._counts()
        if counts is None or counts == self._given:
            return
        for name, given in self._given.items():
            difference = counts.get(name, 0) - given
            self._missing[name] += max(0, difference)
            self._surplus[name] += max(0, -difference)
            self._given[name] += difference

    def acknowledge(self) -> None:
        """Leave all differences up to now out of later reasons."""
        for name in self._given:
            self._missing[name] = self._surplus[name] = 0

    def reasons(self) -> list[tuple[State, str]]:
        """Slots that were read without a comparison, by group; an engine that does not count them."""
        if self._counts() is None:
            text = "this engine does not count its prefix hits: one that is not compared would not be noticed"
            return [(State.DEGRADED, text)]
        found = []
        if any(self._missing.values()):
            text = f"prefix hits were read without a comparison of their bytes: {_named(self._missing)}"
            found.append((State.BLIND, text))
        if any(self._surplus.values()):
            text = f"prefix hits were announced that the engine did not count: {_named(self._surplus)}"
            found.append((State.DEGRADED, text))
        return found


def _named(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {counted(count, 'slot')}" for name, count in counts.items() if count)
