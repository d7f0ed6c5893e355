"""How the block lists of sliding-window groups part from those of the full ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from math import gcd
from typing import Any, NamedTuple

import numpy as np

from canary_obs.engine_api.views import WindowTokens
from canary_obs.engines.vllm.groups import FoundGroup

_Ints = np.ndarray[tuple[int], np.dtype[np.int64]]
BlockLists = Mapping[str, Sequence[int]]  # of one group, by request
NULL_BLOCK = 0


class Served(NamedTuple):
    """One request of a forward."""

    request: str
    before: int  # tokens computed before the forward
    after: int  # and after it, with what it was scheduled to compute


class WindowTables:
    """Compares every sliding-window group of a target model with every full one."""

    def __init__(self, found: Iterable[FoundGroup]) -> None:
        shown = [group for group in found if not group.draft]
        self._full = [group for group in shown if group.view.window is None]
        self._windowed = [group for group in shown if group.view.window is not None]
        # Without one of the two kinds there is nothing to compare, and nobody's lists are asked for.
        self.numbers = {group.number for group in shown} if self._full and self._windowed else set()

    def compare(self, served: Sequence[Served], lists: Mapping[int, BlockLists]) -> WindowTokens | None:
        """Tokens of the requests still known, `lists` by vLLM's group number; None = there are none."""
        known = [row for row in served if all(row.request in lists[number] for number in self.numbers)]
        if not self.numbers or not known:
            return None
        counts = [
            _counted(_Pieces(known, windowed, full.block_size), full, windowed, lists)
            for windowed in self._windowed
            for full in self._full
        ]
        return WindowTokens(
            full=tuple(group.view.name for group in self._full),
            windowed=tuple(group.view.name for group in self._windowed),
            out_of_window=min(gone for gone, _ in counts),
            diverging=min(diverging for _, diverging in counts),
        )


def served_by(output: Any) -> list[Served]:
    """The requests of a scheduler output, as far as it hands them to the runner."""
    cached = output.scheduled_cached_reqs
    computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    computed |= {request.req_id: request.num_computed_tokens for request in output.scheduled_new_reqs}
    scheduled = output.num_scheduled_tokens
    return [
        Served(request, before, before + scheduled[request])
        for request, before in computed.items()
        if request in scheduled
    ]


class _Pieces:
    """What a window has left of each request, in runs of tokens whose slots run on in both groups."""

    def __init__(self, served: Sequence[Served], windowed: FoundGroup, full_block_size: int) -> None:
        window, size = windowed.view.window, windowed.block_size
        assert window is not None
        self._requests = [row.request for row in served]
        before = np.array([row.before for row in served], dtype=np.int64)
        self._after = np.array([row.after for row in served], dtype=np.int64)
        # The worker's lists keep the blocks that the scheduler gives back as a window moves on.
        passed = np.maximum(before - window + 1, 0)
        self.left = np.minimum(passed - passed % size, self._after)
        piece = gcd(size, full_block_size)
        counts = -(-(self._after - self.left) // piece)
        self._row = np.repeat(np.arange(len(served)), counts)
        place = np.arange(self._row.size) - np.repeat(np.cumsum(counts) - counts, counts)
        self._starts = self.left[self._row] + place * piece
        self.lengths = np.minimum(self._after[self._row] - self._starts, piece)

    def slots(self, lists: BlockLists, block_size: int) -> _Ints:
        """The first slot of every piece; below `block_size` = none."""
        first, stop = self.left // block_size, -(-self._after // block_size)
        ranges = zip(self._requests, first.tolist(), stop.tolist(), strict=True)
        blocks = np.fromiter(
            chain.from_iterable(lists[request][start:end] for request, start, end in ranges), dtype=np.int64
        )
        begins = np.cumsum(stop - first) - stop
        order, offsets = np.divmod(self._starts, block_size)
        slots: _Ints = blocks[begins[self._row] + order] * block_size + offsets
        return slots


def _counted(
    pieces: _Pieces, full: FoundGroup, windowed: FoundGroup, lists: Mapping[int, BlockLists]
) -> tuple[int, int]:
    """Tokens without a slot in the window group, and with one of another number than in the full one."""
    mine = pieces.slots(lists[windowed.number], windowed.block_size)
    other = pieces.slots(lists[full.number], full.block_size)
    held = mine // windowed.block_size != NULL_BLOCK
    gone = int(pieces.left.sum()) + int(pieces.lengths[~held].sum())
    return gone, int(pieces.lengths[held & (mine != other)].sum())
