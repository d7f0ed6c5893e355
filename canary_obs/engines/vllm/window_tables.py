"""Compares the block lists of sliding-window groups with those of full-attention groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from math import gcd
from typing import Any, NamedTuple

import numpy as np

from canary_obs.engine_api.views import WindowTokens
from canary_obs.engines.vllm.groups import VllmGroup

_Ints = np.ndarray[tuple[int], np.dtype[np.int64]]
BlockLists = Mapping[str, Sequence[int]]  # of one group, by request
NULL_BLOCK = 0


class ScheduledRequest(NamedTuple):
    """One request of a forward."""

    request: str
    before: int  # tokens computed before the forward
    after: int  # tokens computed after it


class WindowTables:
    """Compares every sliding-window group of the target model with every full one."""

    def __init__(self, groups: Iterable[VllmGroup]) -> None:
        target = [
            group for group in groups if group.of_tokens and not group.draft and group.sharding.ranks == 1
        ]
        self._full = [group for group in target if group.view.window is None]
        self._windowed = [group for group in target if group.view.window is not None]
        # vLLM's group numbers; none without groups of both kinds, as there is nothing to compare.
        self.numbers = {group.number for group in target} if self._full and self._windowed else set()

    def compare(
        self, requests: Sequence[ScheduledRequest], lists: Mapping[int, BlockLists]
    ) -> WindowTokens | None:
        """Tokens of the requests that still have block lists; None = there are none.

        `lists`: block lists by vLLM's group number.
        """
        known = [row for row in requests if all(row.request in lists[number] for number in self.numbers)]
        if not self.numbers or not known:
            return None
        counts = [
            _count(_Runs(known, windowed, full.block_size), full, windowed, lists)
            for windowed in self._windowed
            for full in self._full
        ]
        return WindowTokens(
            full=tuple(group.view.name for group in self._full),
            windowed=tuple(group.view.name for group in self._windowed),
            out_of_window=min(missing for missing, _ in counts),
            diverging=min(diverging for _, diverging in counts),
        )


def scheduled_requests(output: Any) -> list[ScheduledRequest]:
    """The requests that a scheduler output has the runner compute."""
    cached = output.scheduled_cached_reqs
    computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    computed |= {request.req_id: request.num_computed_tokens for request in output.scheduled_new_reqs}
    scheduled = output.num_scheduled_tokens
    return [
        ScheduledRequest(request, before, before + scheduled[request])
        for request, before in computed.items()
        if request in scheduled
    ]


class _Runs:
    """Runs of tokens that a window keeps of each request; their slots are consecutive in both groups."""

    def __init__(
        self, requests: Sequence[ScheduledRequest], windowed: VllmGroup, full_block_size: int
    ) -> None:
        window, size = windowed.view.window, windowed.block_size
        assert window is not None
        self._requests = [row.request for row in requests]
        before = np.array([row.before for row in requests], dtype=np.int64)
        self._after = np.array([row.after for row in requests], dtype=np.int64)
        # The worker's lists still name blocks that the scheduler freed as the window moved on.
        passed = np.maximum(before - window + 1, 0)
        self.dropped = np.minimum(passed - passed % size, self._after)
        run = gcd(size, full_block_size)
        counts = -(-(self._after - self.dropped) // run)
        self._row = np.repeat(np.arange(len(requests)), counts)
        index = np.arange(self._row.size) - np.repeat(np.cumsum(counts) - counts, counts)
        self._starts = self.dropped[self._row] + index * run
        self.lengths = np.minimum(self._after[self._row] - self._starts, run)

    def slots(self, lists: BlockLists, block_size: int) -> _Ints:
        """The first slot of every run; below `block_size` = none (the null block)."""
        first, stop = self.dropped // block_size, -(-self._after // block_size)
        ranges = zip(self._requests, first.tolist(), stop.tolist(), strict=True)
        blocks = np.fromiter(
            chain.from_iterable(lists[request][start:end] for request, start, end in ranges), dtype=np.int64
        )
        begins = np.cumsum(stop - first) - stop
        order, offsets = np.divmod(self._starts, block_size)
        slots: _Ints = blocks[begins[self._row] + order] * block_size + offsets
        return slots


def _count(
    runs: _Runs, full: VllmGroup, windowed: VllmGroup, lists: Mapping[int, BlockLists]
) -> tuple[int, int]:
    """Tokens without a slot in the windowed group, and tokens whose slot differs from the full group's."""
    own = runs.slots(lists[windowed.number], windowed.block_size)
    other = runs.slots(lists[full.number], full.block_size)
    held = own // windowed.block_size != NULL_BLOCK
    missing = int(runs.dropped.sum()) + int(runs.lengths[~held].sum())
    return missing, int(runs.lengths[held & (own != other)].sum())
