"""Compares the forwards that the engine ran, by its own count, with those that were shown and checked."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from canary_obs.runtime.device.state import DeviceState
from canary_obs.runtime.health import Health
from canary_obs.vocabulary import State

_SILENT_SECONDS = 1.0  # without a hook for so long, a verdict looks at the engine's count itself


class ForwardAccount:
    """A forward that was not checked may have written any slot: all slots of its groups become adopted.

    That happens before the next forward's checks, and before anything between forwards compares bytes.
    """

    def __init__(
        self,
        state: DeviceState,
        health: Health,
        counts: Callable[[], Mapping[str, int] | None],
        in_step: Callable[[], bool],
    ) -> None:
        """`counts`: forwards with tokens by group name, counted by the engine; None = it does not count.

        `in_step`: whether a step is under way now.
        """
        health.add_source(self, self.acknowledge)
        self._state, self._counts, self.in_step = state, counts, in_step
        self.checked = dict.fromkeys(state.by_name, 0)  # head and tail launched, or declared as failed
        self._begun = dict.fromkeys(state.by_name, 0)  # what the engine's count should be, from those begun
        self._ended = dict.fromkeys(state.by_name, 0)  # the same, from those checked
        self._open: tuple[str, ...] = ()  # groups of the forward under way
        self._missing = dict.fromkeys(state.by_name, 0)  # since the last acknowledgement
        self._surplus = dict.fromkeys(state.by_name, 0)
        self._unsettled: dict[str, int] | None = None  # the engine's count when an idle call differed
        self._called = time.monotonic()

    def start(self) -> None:
        """Begin to compare: the engine's count is right as of now."""
        now = self.counted or {}
        for name in self.checked:
            self._begun[name] = self._ended[name] = now.get(name, 0)
        self._open = ()

    @property
    def counted(self) -> dict[str, int] | None:
        """The engine's count by group name; None = it does not count. A group it leaves out has 0."""
        counts = self._counts()
        return None if counts is None else {name: counts.get(name, 0) for name in self.checked}

    @property
    def under_way(self) -> bool:
        """Whether a forward was begun and has not ended."""
        return bool(self._open)

    def begin(self, names: Iterable[str]) -> None:
        """A forward over these groups begins: the engine has counted it, and all others have been shown."""
        counts, begun = self._counts(), self._begun
        self._open = tuple(names)
        for name in self._open:
            begun[name] += 1
            if counts is not None and counts.get(name, 0) != begun[name]:
                self._correct(name, counts.get(name, 0) - begun[name])

    def expects(self, names: Iterable[str]) -> bool:
        """Whether `begin` would find the engine's count right."""
        counts = self._counts()
        return counts is None or all(counts.get(name, 0) == self._begun[name] + 1 for name in names)

    def before_comparison(self, name: str) -> None:
        """Records of this group are about to be compared for a forward that is counted, and not begun."""
        counts = self._counts()
        if counts is not None and (missing := counts.get(name, 0) - self._begun[name] - 1) > 0:
            self._correct(name, missing)

    def end(self) -> None:
        """Head and tail of the forward were launched, or its slots were adopted; idempotent."""
        for name in self._open:
            self.checked[name] += 1
            self._ended[name] += 1
        self._open = ()

    def settle(self) -> None:
        """No forward is under way: every one that the engine counted should have been checked."""
        self._settle(self._counts())

    def settle_at_rest(self) -> None:
        """The same, on a thread next to the engine's; nothing while a step is under way."""
        counted = self.counted  # first: a step may begin at any time
        if not self.in_step():
            self._settle(counted)

    def _settle(self, counts: Mapping[str, int] | None) -> None:
        self._called = time.monotonic()
        if counts is None or counts == self._ended:
            return
        for name, ended in self._ended.items():
            if missing := counts.get(name, 0) - ended:
                self._correct(name, missing)
            self._begun[name] = self._ended[name]

    def settle_idle(self) -> bool:
        """`settle`, on a thread next to the engine's: a difference counts from the second call on.

        False = it has to be seen again, because a step may just begin; nothing may be compared until then.
        """
        counted = self.counted  # once: the engine may count the next forward at any time
        if counted is not None and counted != self._ended and counted != self._unsettled:
            self._unsettled = counted
            return False
        self._unsettled = None
        self._settle(counted)
        return True

    def _correct(self, name: str, difference: int) -> None:
        self._begun[name] += difference
        self._ended[name] += difference
        if difference > 0:
            self._missing[name] += difference
            self._state.by_name[name].adopt_all()
        else:
            self._surplus[name] -= difference

    def acknowledge(self) -> None:
        """Leave all differences up to now out of later reasons."""
        for name in self.checked:
            self._missing[name] = self._surplus[name] = 0

    def reasons(self) -> list[tuple[State, str]]:
        """Forwards that were not checked, by group; an engine that does not count them."""
        counted = self.counted
        if counted is None:
            text = "this engine does not count its forwards: one that is not shown would not be noticed"
            return [(State.DEGRADED, text)]
        missing = dict(self._missing)
        if time.monotonic() - self._called > _SILENT_SECONDS:  # nobody has called `settle`
            # A step may have counted a forward and not begun it: a draft's comes after the target's.
            awaited = int(self.in_step())
            for name, count in counted.items():
                missing[name] += max(0, count - self._begun[name] - awaited)
        found = []
        if any(missing.values()):
            found.append((State.BLIND, f"forwards were not shown or not checked: {_named(missing)}"))
        if any(self._surplus.values()):
            text = f"forwards were shown that the engine did not count: {_named(self._surplus)}"
            found.append((State.DEGRADED, text))
        return found


def _named(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items() if count)
