"""Compares what each check of bytes or tokens was given with what its kernel counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from canary_kernels import layout
from canary_obs.vocabulary import State

# Byte checks by number: the comparisons of each phase, then the fingerprinting of new slots.
_FINGERPRINTING = layout.NUM_PHASES
_LAYER_WRITES = _FINGERPRINTING + 1
_KNOWN_TOKENS = _LAYER_WRITES + 1
_NAMES = (
    *(f"{phase.name.lower()} comparison" for phase in layout.Phase),
    "fingerprinting of new slots",
    "comparison of one layer with before",
    "comparison of tokens with the scheduler's",
)
_PHASES = np.arange(layout.NUM_PHASES)
_DONE = np.array(
    [
        *(layout.COUNT_HASHED + _PHASES), layout.COUNT_COMPLETED, layout.COUNT_LAYER_CHECKED,
        layout.COUNT_TOKENS_COMPARED,
    ]
)  # fmt: skip
_LEFT_OUT = np.array(
    [
        *(layout.COUNT_UNHASHED + _PHASES), layout.COUNT_UNCOMPLETED, layout.COUNT_LAYER_LEFT_OUT,
        layout.COUNT_TOKENS_LEFT_OUT,
    ]
)  # fmt: skip


class OwedSlots:
    """A kernel counts every slot it is given, as checked or as left out for a cause: both must add up."""

    def __init__(self, groups: Sequence[str]) -> None:
        self._groups = tuple(groups)
        self._given = [[0] * len(_NAMES) for _ in groups]
        self.before_copy: list[Callable[[], None]] = []  # they add what they have counted so far
        self._expected: dict[int, list[list[int]]] = {}  # by sequence of the copy
        # By (group, byte check), since the last acknowledgement: slots given that no kernel counted.
        self._missing: dict[tuple[int, int], int] = {}

    def compared(self, group: int, phase: layout.Phase, slots: int) -> None:
        """So many slots of a group, padding included, are to be compared in this phase."""
        self._given[group][phase] += slots

    def fingerprinted(self, group: int, slots: int) -> None:
        """So many slots, padding included, are to be fingerprinted after their forward."""
        self._given[group][_FINGERPRINTING] += slots

    def layer_checked(self, group: int, slots: int) -> None:
        """One layer of so many new slots is to be compared with before."""
        self._given[group][_LAYER_WRITES] += slots

    def tokens_compared(self, group: int, requests: int) -> None:
        """The tokens of so many requests are to be compared with what the scheduler knows of them."""
        self._given[group][_KNOWN_TOKENS] += requests

    def expect(self, sequence: int) -> None:
        """The counter copy with this sequence must show every slot given so far."""
        for add in self.before_copy:
            add()
        self._expected[sequence] = [list(given) for given in self._given]

    def reconcile(self, sequence: int, counters: NDArray[np.int64]) -> None:
        """Compare a copy, [groups, COUNTER_WORDS], with what was given before it."""
        expected = self._expected.pop(sequence, None)
        if expected is None:
            return
        for skipped in [number for number in self._expected if number < sequence]:
            del self._expected[skipped]  # copies that were never processed
        counted = (counters[:, _DONE] + counters[:, _LEFT_OUT]).tolist()
        if counted == expected:
            return
        for group, (wanted, seen) in enumerate(zip(expected, counted, strict=True)):
            for number, (given, done) in enumerate(zip(wanted, seen, strict=True)):
                if given != done:
                    self._report(group, number, given - done)
                    # Reported once: later copies must not repeat it.
                    for counts in (self._given, *self._expected.values()):
                        counts[group][number] -= given - done

    def lost(self, group: int, phase: layout.Phase, slots: int) -> None:
        """So many slots that were given on the patrol's own stream were not counted there."""
        self._report(group, phase, slots)

    def _report(self, group: int, number: int, slots: int) -> None:
        self._missing[group, number] = self._missing.get((group, number), 0) + slots

    def acknowledge(self) -> None:
        """Leave all differences up to now out of later reasons."""
        self._missing.clear()

    def reasons(self) -> list[tuple[State, str]]:
        """Byte checks whose kernels did not count what they were given."""
        found = []
        for (group, number), missing in sorted(self._missing.items()):
            what, unit = ("tokens", "requests") if number == _KNOWN_TOKENS else ("bytes", "slots")
            text = f"{_NAMES[number]}, group {self._groups[group]}, {missing} {unit}"
            found.append((State.BLIND, f"{what} were not checked: {text}"))
        return found
