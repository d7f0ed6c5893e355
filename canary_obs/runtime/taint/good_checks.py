"""When a slot was last found intact, on a clock that is finer than forwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from canary_obs.records import Violation
from canary_obs.runtime.taint.held_blocks import Bools, Content, Ints
from canary_obs.vocabulary import GoodCheck, Phase, Reason

# Forward s reads at 4 s + 2: what precedes it is at 4 s + 1, what follows it at 4 s + 3.
_PER_FORWARD, _BEFORE, _READS, _AFTER = 4, 1, 2, 3
OF_ROWS = frozenset(
    {
        Reason.CHAIN, Reason.POSITION, Reason.TOKEN, Reason.UNWRITTEN, Reason.WRITE_TOKEN,
        Reason.WRITE_POSITION,
    }
)  # fmt: skip


class GoodTime(NamedTuple):
    """The last good check and its time; the first forward that may have read damage follows from it."""

    time: int
    check: GoodCheck

    @property
    def first_forward(self) -> int:
        """The first forward whose reads are later."""
        return max(0, (self.time - _READS) // _PER_FORWARD + 1)

    @property
    def step(self) -> int:
        """The forward that it belongs to."""
        return self.time // _PER_FORWARD


def is_of_row(row: Violation) -> bool:
    """Whether every forward makes this check, for each of its requests, so that it finds it first."""
    return row.reason in OF_ROWS


def of_row(row: Violation) -> GoodTime:
    """The forward before had the same check, and did not fail it."""
    return GoodTime(row.step * _PER_FORWARD + _BEFORE, GoodCheck.FORWARD)


class GoodChecks:
    """What the host knows of checks of bytes: no kernel counts them slot by slot."""

    def __init__(
        self,
        written: Callable[[str, int], int | None],
        patrolled: Callable[[str, int], int | None],
        *,
        hits_compared: bool,
        before_load: Callable[[Violation], bool] | None = None,
    ) -> None:
        """`written`: forward of a slot's last write. `patrolled`: the last one before the patrol passed it
        and found it intact. Both None = not known. `hits_compared`: blocks that join a request are compared.
        `before_load`: whether a row is of what was there when a load began, after forward `row.step`.
        """
        self._before_load = before_load
        self._written, self._patrolled, self._hits_compared = written, patrolled, hits_compared
        self.began = 0  # the last forward before records were kept
        self.dropped = -1  # the last forward whose findings were not all read: a hit may have failed

    def before_load(self, row: Violation) -> bool:
        """Whether the check was of what a load has written over since."""
        return self._before_load is not None and self._before_load(row)

    def written(self, row: Violation) -> int | None:
        """The forward of the last write of the row's slot, where it was before the check."""
        found = self._written(row.group, row.slot)
        # A forward writes over what was compared before it.
        newest = row.step - 1 if row.phase is Phase.HEAD and not self.before_load(row) else row.step
        return found if found is not None and found <= newest else None

    def last(self, row: Violation, content: Content, joins: tuple[Ints, Bools]) -> GoodTime:
        """The last good check of the slot's bytes before this row; `joins`: forwards since which lives hold
        the block, and which of them joined it."""
        since = content.since
        best = GoodTime(self.began * _PER_FORWARD + _AFTER, GoodCheck.ATTACHED)
        if since is not None:
            # Loads and copies arrive before the forward that follows them.
            best = GoodTime(since * _PER_FORWARD + _BEFORE, GoodCheck.WRITTEN)
        written = self._written(row.group, row.slot)
        # What the forward itself has written is what its own checks are of.
        newest = {Phase.HEAD: -1, Phase.TAIL: row.step - 1}.get(row.phase, row.step)
        if written is not None and written <= newest and content.until is None:
            best = max(best, GoodTime(written * _PER_FORWARD + _AFTER, GoodCheck.WRITTEN))
        starts, joined = joins
        hits = (
            starts[joined & (starts < row.step) & (starts > self.dropped)]
            if self._hits_compared
            else starts[:0]
        )
        if hits.size:
            best = max(best, GoodTime(int(np.max(hits)) * _PER_FORWARD + _BEFORE, GoodCheck.HIT))
        # One after this finding was of what has been written since.
        latest = row.step if row.phase in (Phase.PATROL, Phase.SWEEP) else row.step - 1
        passed = self._patrolled(row.group, row.slot)
        if passed is not None and passed <= latest:
            best = max(best, GoodTime(passed * _PER_FORWARD + _AFTER, GoodCheck.PATROL))
        return best
