"""Which lives held which blocks from which forward on, in columns: one row per block that a life got."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from canary_obs.engine_api.requests import AddedBlocks, GrownBlock

Ints = np.ndarray[tuple[int], np.dtype[np.int64]]
Bools = np.ndarray[tuple[int], np.dtype[np.bool_]]
_BLOCK, _LIFE, _NUMBER, _START, _COMPUTED, _JOINED = range(6)
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
        self._grown: list[tuple[int, ...]] = []  # rows after those

    @property
    def count(self) -> int:
        """Rows."""
        return self._written + len(self._grown)

    @property
    def _rows(self) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
        """int64 [6, count]: all rows so far."""
        self._settle()
        return self._columns[:, : self._written]

    def _settle(self) -> None:
        if self._grown:
            grown, self._grown = self._grown, []
            self._append(len(grown))[:] = np.array(grown, dtype=np.int64).T

    def _append(self, size: int) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
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

    def add_one_each(self, lives: Sequence[int], grown: Sequence[GrownBlock], start: int) -> None:
        """These lives read one more block each from forward `start` on."""
        self._grown += [
            (one.block, life, one.number, start, one.computed, 0)
            for life, one in zip(lives, grown, strict=True)
        ]
        if len(self._grown) >= _GROWN:
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

    def content(self, block: int, step: int, *, before_refill: bool) -> Content:
        """What a block held in forward `step`; `before_refill`: before a request began to fill it last."""
        rows = self._rows
        mine = (rows[_BLOCK] == block) & (rows[_JOINED] == 0) & (rows[_START] <= step)
        fills = np.unique(rows[_START, mine])
        until: int | None = None
        if before_refill and fills.size:
            until, fills = int(fills[-1]), fills[:-1]
        else:
            later = rows[_START, (rows[_BLOCK] == block) & (rows[_JOINED] == 0) & (rows[_START] > step)]
            until = int(later.min()) if later.size else None
        return Content(int(fills[-1]) if fills.size else None, until)

    def fillers(self, block: int, since: int) -> list[tuple[int, int]]:
        """Lives that began to fill a block in this forward, and its number in their lists."""
        rows = self._rows
        mine = (rows[_BLOCK] == block) & (rows[_JOINED] == 0) & (rows[_START] == since)
        return list(zip(rows[_LIFE, mine].tolist(), rows[_NUMBER, mine].tolist(), strict=True))

    def of_content(self, block: int, content: Content) -> tuple[Ints, Ints, Bools]:
        """Lives that held this content of a block, the forward each began to, and who joined it."""
        rows = self._rows
        mine = rows[_BLOCK] == block
        if content.since is not None:
            mine &= rows[_START] >= content.since
        if content.until is not None:
            mine &= rows[_START] < content.until
        return rows[_LIFE, mine], rows[_START, mine], rows[_JOINED, mine] != 0

    def holds(self, life: int, block: int) -> bool:
        """Whether a life has this block in its list."""
        rows = self._rows
        return bool(((rows[_LIFE] == life) & (rows[_BLOCK] == block)).any())

    def computed_at(self, life: int, step: int) -> int:
        """The tokens that a life had at least, before forward `step`; 0 = not known."""
        rows = self._rows
        mine = (rows[_LIFE] == life) & (rows[_START] <= step)
        return int(rows[_COMPUTED, mine].max(initial=0))

    def filled_since(self, life: int, first_number: int) -> tuple[Ints, Ints]:
        """Blocks that a life fills itself, from this number in its list on, and since which forward."""
        rows = self._rows
        mine = (rows[_LIFE] == life) & (rows[_JOINED] == 0) & (rows[_NUMBER] >= first_number)
        return rows[_BLOCK, mine], rows[_START, mine]

    def latest_fill(self, blocks: Ints) -> Ints:
        """The forward that began to fill each of these blocks last; -1 = not known."""
        rows = self._rows
        fills = rows[:, np.isin(rows[_BLOCK], blocks) & (rows[_JOINED] == 0)]
        places = np.unique(blocks)
        latest = np.full(places.size, -1, dtype=np.int64)
        np.maximum.at(latest, np.searchsorted(places, fills[_BLOCK]), fills[_START])
        return latest[np.searchsorted(places, blocks)]

    def joined_later(self, blocks: Ints, since: Ints) -> Iterable[tuple[int, int]]:
        """Lives that joined one of these contents (block, filled since), and since which forward."""
        rows = self._rows
        named = np.isin(rows[_BLOCK], blocks)
        filled: dict[int, list[int]] = {}
        for block, start in zip(
            *rows[np.ix_((_BLOCK, _START), named & (rows[_JOINED] == 0))].tolist(), strict=True
        ):
            filled.setdefault(block, []).append(start)
        wanted = set(zip(blocks.tolist(), since.tolist(), strict=True))
        found: dict[int, int] = {}
        readers = rows[np.ix_((_BLOCK, _LIFE, _START), named & (rows[_JOINED] != 0))].tolist()
        for block, life, start in zip(*readers, strict=True):
            begun = max((own for own in filled.get(block, ()) if own <= start), default=None)
            if begun is not None and (block, begun) in wanted:
                found[life] = min(start, found.get(life, start))
        return found.items()
