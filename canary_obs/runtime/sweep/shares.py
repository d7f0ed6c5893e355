"""Accounts for each group's part in a sweep: what it owes, when it was launched, and what counters show."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from canary_kernels import layout
from canary_obs.engine_api.adapter import PrefixCache
from canary_obs.records import SweepShare
from canary_obs.runtime.device.state import DeviceState, Group

_CHECKED = layout.COUNT_VERIFIED + layout.Phase.SWEEP
_LANES = layout.COUNT_VIOLATIONS + layout.Phase.SWEEP * layout.NUM_REASONS
_UNVERIFIED = layout.COUNT_UNVERIFIED + layout.Phase.SWEEP * layout.NUM_UNVERIFIED
_CAUSES = layout.Unverified.ADOPTED, layout.Unverified.BASELINE, layout.Unverified.PENDING
_SKIPPED = tuple(_UNVERIFIED + cause for cause in _CAUSES)


@dataclass(slots=True, kw_only=True)
class _Debt:
    """What a sweep owes for one group."""

    slots: int
    removed: int | None  # the engine's count when the sweep started; None = unknown
    evicted: int = 0  # slots left out, as no longer cached
    span: tuple[float, float] | None = None  # first and last launch


class SweepShares:
    """One sweep at a time. Seconds count from its start."""

    def __init__(self, state: DeviceState, prefix_cache: PrefixCache) -> None:
        self._groups, self._cache = state.groups, prefix_cache
        self._before = [(0, 0, 0) for _ in state.groups]  # totals when the last sweep ended
        self._debts: dict[int, _Debt] = {}  # by group

    def start(self) -> None:
        """Begin a sweep."""
        self._debts.clear()

    def owe(self, group: Group, slots: int) -> None:
        """The sweep owes an account of this many slots of a group."""
        count = self._cache.count(group.name)
        self._debts[group.index] = _Debt(slots=slots, removed=None if count is None else count.removed)

    def add_chunk(self, group: int, evicted: int, began: float, ended: float) -> None:
        """Note that a chunk of a group was launched, `evicted` of its slots left out."""
        debt = self._debts[group]
        debt.evicted += evicted
        debt.span = began if debt.span is None else debt.span[0], ended

    @property
    def evicted(self) -> int:
        """Slots left out so far."""
        return sum(debt.evicted for debt in self._debts.values())

    def shortfall(self, counters: Tensor) -> str | None:
        """What is missing from these counters, int64 [groups * COUNTER_WORDS] on the host; None = nothing."""
        found = []
        for (index, debt), row in zip(self._debts.items(), self._rows(counters), strict=True):
            name, (checked, skipped, _) = self._groups[index].name, row
            missing = debt.slots - checked - skipped - debt.evicted
            if debt.span is None:
                found.append(f"group {name} was not swept")
            elif missing:
                found.append(f"{missing} of {debt.slots} slots of group {name} are unaccounted for")
            count = self._cache.count(name)
            gone = None if count is None or debt.removed is None else count.removed - debt.removed
            if gone is not None and debt.evicted > gone:
                found.append(
                    f"{debt.evicted} slots of group {name} were left out as evicted, but the engine evicted "
                    f"{gone}"
                )
        return "; ".join(found) or None

    def settle(self, counters: Tensor) -> tuple[SweepShare, ...]:
        """End the sweep with these counters, int64 [groups * COUNTER_WORDS] on the host."""
        shares = tuple(
            SweepShare(
                group=self._groups[index].name,
                total=debt.slots,
                checked=checked,
                violations=violations,
                began=debt.span[0],
                ended=debt.span[1],
            )
            for (index, debt), (checked, _, violations) in zip(
                self._debts.items(), self._rows(counters), strict=True
            )
            if debt.span is not None
        )
        self._before = [_totals(row) for row in counters.view(-1, layout.COUNTER_WORDS).tolist()]
        return shares

    def _rows(self, counters: Tensor) -> list[tuple[int, int, int]]:
        """Checked and skipped slots and violations of this sweep, by group in the order of `owe`."""
        rows = counters.view(-1, layout.COUNTER_WORDS).tolist()
        found = []
        for index in self._debts:
            now, before = _totals(rows[index]), self._before[index]
            found.append((now[0] - before[0], now[1] - before[1], now[2] - before[2]))
        return found


def _totals(row: list[int]) -> tuple[int, int, int]:
    found_wanting = row[_LANES + layout.Reason.UNWRITTEN] + row[_LANES + layout.Reason.RECORD]
    skipped = sum(row[word] for word in _SKIPPED)
    return row[_CHECKED] + found_wanting, skipped, sum(row[_LANES : _LANES + layout.NUM_REASONS])
