"""Accounts for each group's part in a sweep: when it was launched, and what its counters show."""

from __future__ import annotations

from torch import Tensor

from canary_kernels import layout
from canary_obs.records import SweepShare
from canary_obs.runtime.device.state import DeviceState

_CHECKED = layout.COUNT_VERIFIED + layout.Phase.SWEEP
_LANES = layout.COUNT_VIOLATIONS + layout.Phase.SWEEP * layout.NUM_REASONS


class SweepShares:
    """One sweep at a time. Seconds count from its start."""

    def __init__(self, state: DeviceState) -> None:
        self._groups = state.groups
        self._before = [(0, 0) for _ in state.groups]  # checked, violations when the last sweep ended
        self._spans: dict[int, tuple[int, float, float]] = {}  # by group: slots, began, ended

    def start(self) -> None:
        """Begin a sweep."""
        self._spans.clear()

    def add_chunk(self, group: int, slots: int, began: float, ended: float) -> None:
        """Note that a chunk of a group was launched; `slots` is the group's total."""
        first = self._spans[group][1] if group in self._spans else began
        self._spans[group] = slots, first, ended

    def settle(self, counters: Tensor) -> tuple[SweepShare, ...]:
        """End the sweep with these counters, int64 [groups * COUNTER_WORDS] on the host."""
        rows = counters.view(-1, layout.COUNTER_WORDS).tolist()
        totals = [_totals(row) for row in rows]
        shares = tuple(
            SweepShare(
                group=self._groups[index].name,
                total=slots,
                checked=totals[index][0] - self._before[index][0],
                violations=totals[index][1] - self._before[index][1],
                began=began,
                ended=ended,
            )
            for index, (slots, began, ended) in self._spans.items()
        )
        self._before = totals
        return shares


def _totals(row: list[int]) -> tuple[int, int]:
    unwritten = row[_LANES + layout.Reason.UNWRITTEN]
    return row[_CHECKED] + unwritten, sum(row[_LANES : _LANES + layout.NUM_REASONS])
