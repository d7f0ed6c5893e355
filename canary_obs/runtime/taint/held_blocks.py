"""Which lives held which blocks from which forward on, in columns: one row per block that a life got."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from canary_obs.engine_api.requests import AddedBlocks, GrownBlocks

Ints = np.ndarray[tuple[int], np.dtype[np.int64]]
Bools = np.ndarray[tuple[int], np.dtype[np.bool_]]
_BLOCK, _LIFE, _NUMBER, _START, _COMPUTED, _JOINED = range(6)
_Rows = np.ndarray[tuple[int, int], np.dtype[np.int64]]
_FIRST_CAPACITY = 1024
_GROWN = 64  # blocks of requests that go on, which become rows together


@dataclass(frozen=True, slots=True)
class Content:
    """What a block held between two fillings: `since` the forward that began to fill it, before `until`."""

    since: int | None  # None = it was filled before the rows begin
    until: int | None  # None = it is there now


class HeldBlocks:
    """The rows of one numbering, in the order of their forwards."""

    def __init__(self) -> None:
        self._columns = np.empty((6, _FIRST_CAPACITY), dtype=np.int64)
        self._written = 0  # rows in the columns
        self._grown: tuple[list[int], ...] = tuple([] for _ in range(_JOINED))  # columns of rows after those
        # Rows of a block, or a life, that were asked for since the last change: by column and its value.
        self._asked: dict[tuple[int, int], _Rows] = {}

    @property
    def count(self) -> int:
        """Rows."""
        return self._written + len(self._grown[_BLOCK])

    @property
    def _rows(self) -> _Rows:
        """int64 [6, count]: all rows so far."""
        self._settle()
        return self._columns[:, : self._written]

    def _settle(self) -> None:
        if self._grown[_BLOCK]:
            rows = self._append(len(self._grown[_BLOCK]))
            for row, column in zip(rows, self._grown, strict=False):
                row[:] = column
                column.clear()
            rows[_JOINED] = 0

    def _append(self, size: int) -> _Rows:
        """int64 [6, size]: new rows, to be filled."""
        first, self._written = self._written, self._written + size
        while self._written > self._columns.shape[1]:
            self._columns = np.concatenate([self._columns, np.empty_like(self._columns)], axis=1)
        return self._columns[:, first : self._written]

    @property
    def nbytes(self) -> int:
        """Host bytes."""
        return self._columns.nbytes

    def add(self, life: int, added: AddedBlocks, start: int, computed: int) -> None:
        """A life reads these blocks from forward `start` on, `computed` of its tokens being there."""
        self._settle()
        size = added.blocks.size
        rows = self._append(size)
        rows[_BLOCK] = added.blocks
        rows[_LIFE] = life
        rows[_NUMBER] = np.arange(added.first, added.first + size)
        rows[_START], rows[_COMPUTED] = start, computed
        rows[_JOINED] = np.arange(size) < added.joined
        self._asked.clear()

    def add_one_each(self, lives: Sequence[int], grown: GrownBlocks, start: int) -> None:
        """These lives, one for each of the requests, read a block more each from forward `start` on."""
        columns = grown.blocks, lives, grown.numbers, [start] * len(lives), grown.computed
        for column, more in zip(self._grown, columns, strict=True):
            column += more
        self._asked.clear()
        if len(self._grown[_BLOCK]) >= _GROWN:
            self._settle()

    def keep(self, kept: Ints) -> None:
        """Drop the rows of all lives but these (ascending), which are numbered anew."""
        rows = self._rows
        numbers = np.full(int(rows[_LIFE].max(initial=0)) + 1, -1, dtype=np.int64)
        numbers[kept[kept < numbers.size]] = np.arange(np.count_nonzero(kept < numbers.size))
        rows[_LIFE] = numbers[rows[_LIFE]]
        stays = np.flatnonzero(rows[_LIFE] >= 0)
        for column in rows:  # each by itself: a tenth of what all at once take
            column[: stays.size] = column[stays]
        self._written = stays.size
        self._asked.clear()

    def content(self, block: int, step: int, *, before_refill: bool) -> Content:
        """What a block held in forward `step`; `before_refill`: before a request began to fill it last."""
        rows = self._of(_BLOCK, block)
        starts = rows[_START, rows[_JOINED] == 0]
        fills, later = starts[starts <= step], starts[starts > step]
        until = int(later.min()) if later.size else None
        if before_refill and fills.size:
            until = int(fills.max())
            fills = fills[fills < until]
        return Content(int(fills.max()) if fills.size else None, until)

    def fills(self) -> tuple[Ints, Ints]:
        """Blocks that lives fill, and since which forwards."""
        rows = self._rows
        mine = rows[_JOINED] == 0
        return rows[_BLOCK, mine], rows[_START, mine]

    def fillers_of(
        self, contents: Collection[tuple[int, int]]
    ) -> dict[tuple[int, int], list[tuple[int, int]]]:
        """`fillers` of each of these contents (block, filled since); of those that have any."""
        rows = self._in(_BLOCK, np.array([block for block, _ in contents], dtype=np.int64))
        rows = rows[:, rows[_JOINED] == 0]
        found: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for block, start, *filler in rows[[_BLOCK, _START, _LIFE, _NUMBER]].T.tolist():
            if (block, start) in contents:
                found.setdefault((block, start), []).append((filler[0], filler[1]))
        return found

    def fillers(self, block: int, since: int) -> list[tuple[int, int]]:
        """Lives that began to fill a block in this forward, and its number in their lists."""
        rows = self._of(_BLOCK, block)
        mine = (rows[_JOINED] == 0) & (rows[_START] == since)
        return list(zip(rows[_LIFE, mine].tolist(), rows[_NUMBER, mine].tolist(), strict=True))

    def of_content(self, block: int, content: Content) -> tuple[Ints, Ints, Bools]:
        """Lives that held this content of a block, the forward each began to, and who joined it."""
        rows = self._of(_BLOCK, block)
        mine = np.ones(rows.shape[1], dtype=np.bool_)
        if content.since is not None:
            mine &= rows[_START] >= content.since
        if content.until is not None:
            mine &= rows[_START] < content.until
        return rows[_LIFE, mine], rows[_START, mine], rows[_JOINED, mine] != 0

    def holds(self, life: int, block: int) -> bool:
        """Whether a life has this block in its list."""
        return bool((self._of(_BLOCK, block)[_LIFE] == life).any())

    def computed_at(self, life: int, step: int) -> int:
        """The tokens that a life had at least, before forward `step`; 0 = not known."""
        rows = self._of(_LIFE, life)
        return int(rows[_COMPUTED, rows[_START] <= step].max(initial=0))

    def computed(self, lives: Ints, steps: Ints) -> Ints:
        """`computed_at` of each of these lives (no life twice) and forwards."""
        found = np.zeros(lives.size, dtype=np.int64)
        rows, places = self._of_lives(lives)
        begun = rows[_START] <= steps[places]
        np.maximum.at(found, places[begun], rows[_COMPUTED, begun])
        return found

    def filled_since(self, lives: Ints, first_numbers: Ints) -> tuple[Ints, Ints]:
        """Blocks that lives fill, from a number in the list of each on, and since which forwards."""
        rows, places = self._of_lives(lives)
        mine = (rows[_JOINED] == 0) & (rows[_NUMBER] >= first_numbers[places])
        return rows[_BLOCK, mine], rows[_START, mine]

    def latest_fill(self, blocks: Ints) -> Ints:
        """The forward that began to fill each of these blocks last; -1 = not known."""
        rows = self._in(_BLOCK, blocks)
        fills = rows[:, rows[_JOINED] == 0]
        latest = np.full(int(blocks.max(initial=0)) + 1, -1, dtype=np.int64)
        np.maximum.at(latest, fills[_BLOCK], fills[_START])
        return latest[blocks]

    def joined_later(self, blocks: Ints, since: Ints) -> list[tuple[int, int]]:
        """Lives that joined one of these contents (block, filled since), and since which forward."""
        rows = self._in(_BLOCK, blocks)
        if not rows[_JOINED].any():
            return []
        # By block and forward, who fills it before who joins it: a join is of the last filling before it.
        rows = rows[:, np.lexsort((rows[_JOINED], rows[_START], rows[_BLOCK]))]
        places = np.arange(rows.shape[1])
        fills = np.maximum.accumulate(np.where(rows[_JOINED] == 0, places, 0))
        joins = (rows[_JOINED] != 0) & (rows[_JOINED, fills] == 0) & (rows[_BLOCK, fills] == rows[_BLOCK])
        joined, begun = rows[:, joins], rows[_START, fills[joins]]
        span = int(max(begun.max(initial=0), since.max(initial=0))) + 1
        joined = joined[:, np.isin(joined[_BLOCK] * span + begun, blocks * span + since)]
        joined = joined[:, np.argsort(joined[_START], kind="stable")]
        lives, first = np.unique(joined[_LIFE], return_index=True)
        return list(zip(lives.tolist(), joined[_START, first].tolist(), strict=True))

    def _of(self, column: int, value: int) -> _Rows:
        """The rows with this value in a column, kept until there are others."""
        found = self._asked.get((column, value))
        if found is None:
            rows = self._rows
            found = self._asked[column, value] = rows[:, rows[column] == value]
        return found

    def _in(self, column: int, values: Ints) -> _Rows:
        """The rows with one of these values in a column."""
        rows = self._rows
        wanted = np.zeros(int(max(rows[column].max(initial=0), values.max(initial=0))) + 1, dtype=np.bool_)
        wanted[values] = True
        return rows[:, wanted[rows[column]]]

    def _of_lives(self, lives: Ints) -> tuple[_Rows, Ints]:
        """The rows of these lives, and the place of each row's life among them."""
        rows = self._in(_LIFE, lives)
        places = np.zeros(int(lives.max(initial=0)) + 1, dtype=np.int64)
        places[lives] = np.arange(lives.size)
        return rows, places[rows[_LIFE]]
