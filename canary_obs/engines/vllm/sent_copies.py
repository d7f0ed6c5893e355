"""What is known of the copies that are on their way into a worker's blocks."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from canary_obs.copy_records.stored_copies import MOST, Fold

_Rows = NDArray[np.int64]
_PEERS = 1 << 12  # names, before those that nothing known is from are forgotten


class KnownCopies(NamedTuple):
    """The copies that may be on their way into some blocks, int64."""

    filled: _Rows  # [n]: the folds are of a block's first slots, so many
    counts: _Rows  # [n]: of folds; 0 = nothing is known
    folds: _Rows  # [n, MOST, 2]: of K and V
    peer: str  # who sent all of them, as in `Observer.received`; "" = unknown, or several

    def with_later(self, later: KnownCopies) -> KnownCopies:
        """The same blocks, of some of which more was said since."""
        said = later.filled > 0
        if not said.any():
            return self
        return KnownCopies(
            filled=np.where(said, later.filled, self.filled),
            counts=np.where(said, later.counts, self.counts),
            folds=np.where(said[:, None, None], later.folds, self.folds),
            peer=later.peer if said.all() or later.peer == self.peer else "",
        )


class _Column(IntEnum):
    KNOWN = 0  # 1 = something was said of this block
    FILLED = 1
    COUNT = 2
    PEER = 3
    FOLDS = 4


class Copies:
    """By group and block. A table per group: the hundreds of blocks of a job are put and taken at once."""

    def __init__(self) -> None:
        self._tables: dict[str, _Rows] = {}
        self._peers: dict[str, int] = {"": 0}
        self.puts = 0
        # Since a load last began: after which event each submitted job is copied; None = that is not known.
        self.ends: list[torch.Event | None] = []
        self._said: dict[str, int] = {}  # by group: blocks of which something is known, or more

    def put(
        self,
        group: str,
        blocks: Sequence[int],
        filled: int | Sequence[int],
        found: Sequence[Sequence[Fold]],
        peer: str = "",
    ) -> None:
        """The copies of each block; those of a block that are more than MOST are not known."""
        if not blocks:
            return
        self.puts += 1
        table, count = self._table(group, max(blocks)), len(blocks)
        rows = np.zeros((count, table.shape[1]), dtype=np.int64)
        rows[:, _Column.KNOWN], rows[:, _Column.FILLED] = 1, filled
        rows[:, _Column.PEER] = self._number(peer)
        counts = list(map(len, found))
        if counts == [1] * count:
            rows[:, _Column.FOLDS : _Column.FOLDS + 2] = [fold for (fold,) in found]
            rows[:, _Column.COUNT] = 1
        else:
            for row, folds in zip(rows, found, strict=True):
                if 0 < len(folds) <= MOST:
                    row[_Column.FOLDS : _Column.FOLDS + 2 * len(folds)] = np.ravel(folds)
                    row[_Column.COUNT] = len(folds)
        before = int(table[blocks, _Column.KNOWN].sum())
        table[blocks] = rows
        self._said[group] = self._said.get(group, 0) + count - before

    def take(self, group: str, blocks: _Rows) -> KnownCopies:
        """What is known of these blocks; nothing is known of them afterwards."""
        table = self._table(group, int(blocks.max(initial=0)))
        rows = table[blocks]
        table[blocks, _Column.KNOWN : _Column.FOLDS] = 0
        self._said[group] = self._said.get(group, 0) - np.unique(blocks[rows[:, _Column.KNOWN] == 1]).size
        peers = set(rows[:, _Column.PEER].tolist())
        folds = rows[:, _Column.FOLDS :].reshape(-1, MOST, 2)
        peer = self._peer(peers.pop()) if len(peers) == 1 else ""
        return KnownCopies(rows[:, _Column.FILLED], rows[:, _Column.COUNT], folds, peer)

    def forget(self, group: str, blocks: Sequence[int]) -> None:
        """Nothing is known of these blocks from now on."""
        if not self._said.get(group):  # as when each load before it was judged
            return
        table, rows = self._table(group, max(blocks, default=0)), np.array(blocks, dtype=np.int64)
        known = rows[table[rows, _Column.KNOWN] == 1]
        if known.size:
            table[known, _Column.KNOWN : _Column.FOLDS] = 0
            self._said[group] -= np.unique(known).size

    def _table(self, group: str, block: int) -> _Rows:
        table = self._tables.get(group)
        if table is None or table.shape[0] <= block:
            held = 0 if table is None else table.shape[0]
            # Memory that was never written takes no room.
            grown = np.zeros((max(2 * held, block + 1, 1024), _Column.FOLDS + 2 * MOST), dtype=np.int64)
            if table is not None:
                grown[:held] = table
            table = self._tables[group] = grown
        return table

    def _number(self, peer: str) -> int:
        number = self._peers.get(peer)
        if number is None:
            if len(self._peers) >= _PEERS:  # most of them have sent all they had
                known = [table[table[:, _Column.KNOWN] == 1] for table in self._tables.values()]
                used = {0}.union(*(rows[:, _Column.PEER].tolist() for rows in known))
                self._peers = {name: one for name, one in self._peers.items() if one in used}
            number = self._peers[peer] = max(self._peers.values()) + 1
        return number

    def _peer(self, number: int) -> str:
        return next(peer for peer, known in self._peers.items() if known == number)
