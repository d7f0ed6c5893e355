"""Compares the forwards that were checked with those whose view has the slots that attention was given."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from canary_obs.engine_api.views import ComparedTables
from canary_obs.runtime.forward_account import ForwardAccount
from canary_obs.runtime.health import Health
from canary_obs.vocabulary import State


class TableAccount:
    """A forward whose tables were not compared may have read other slots than those that were verified."""

    def __init__(
        self,
        health: Health,
        forwards: ForwardAccount,
        counts: Callable[[], Mapping[str, ComparedTables] | None],
    ) -> None:
        """`counts`: the adapter's, by group name; None = its views are what attention reads."""
        health.add_source(self, self.acknowledge)
        self._checked, self._counts = forwards.checked, counts
        self._settled: dict[str, int] = {}  # by group: forwards not compared that are left out of reasons
        self._accepted: set[tuple[str, str]] = set()  # groups and gaps that were acknowledged

    def start(self) -> None:
        """Begin to compare: nothing is missing as of now."""
        self._settled = self._missing()

    def acknowledge(self) -> None:
        """Leave what is missing by now out of later reasons, and what is missing for the same cause."""
        self._settled = self._missing()
        self._accepted |= {(name, found.gap) for name, found in self._now().items() if found.gap is not None}

    def reasons(self) -> list[tuple[State, str]]:
        """Groups with forwards that were not compared."""
        found, now = [], self._now()
        for name, missing in self._missing().items():
            count, gap = missing - self._settled.get(name, 0), now[name].gap
            if count > 0 and (gap is None or (name, gap) not in self._accepted):
                text = f"the slots that attention was given were not compared: group {name}, {count} forwards"
                found.append((State.DEGRADED, text if gap is None else f"{text} ({gap})"))
        return found

    def _now(self) -> Mapping[str, ComparedTables]:
        return self._counts() or {}

    def _missing(self) -> dict[str, int]:
        # A forward is compared when it begins and checked when it has ended.
        return {name: self._checked[name] - found.forwards for name, found in self._now().items()}
