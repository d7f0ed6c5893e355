"""Blocks that join requests through the prefix cache: shown to the canary, and counted by the scheduler."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from canary_obs.engine_api.observer import Observer
from canary_obs.engines.vllm.context_parallel import block_tokens
from canary_obs.engines.vllm.groups import VllmGroup
from canary_obs.engines.vllm.window_tables import NULL_BLOCK

HITS_ATTRIBUTE = "kv_canary_prefix_hits"  # of SchedulerOutput: HitBlocks
TOKENS = "_kv_canary_hit_tokens"  # of KVCacheManager: by request that is still to be scheduled
TOTALS = "_kv_canary_hit_blocks"  # of KVCacheManager: by group number
UNCHANGED = "_kv_canary_hits_unchanged"  # of KVCacheManager: HitBlocks of an output that adds none


class HitBlocks(NamedTuple):
    """Blocks that joined requests since the scheduler's start, by vLLM's group number."""

    before: tuple[int, ...]  # this output
    after: tuple[int, ...]  # with it


def note_hit(manager: Any, request: str, tokens: int) -> None:
    """The scheduler gave a request this many tokens from the prefix cache."""
    vars(manager).setdefault(TOKENS, {})[request] = tokens


def send_hits(scheduler: Any, output: Any) -> None:
    """Let the count of blocks that joined requests travel with an output to every worker."""
    manager = scheduler.kv_cache_manager
    noted = manager.__dict__
    tokens, unchanged = noted.get(TOKENS), noted.get(UNCHANGED)
    if not tokens and unchanged is not None:
        output.__dict__[HITS_ATTRIBUTE] = unchanged
        return
    groups = manager.kv_cache_config.kv_cache_groups
    totals = vars(manager).setdefault(TOTALS, [0] * len(groups))
    before = tuple(totals)
    if tokens:
        copied, joined = _copied(output), [set[int]() for _ in groups]
        for request, computed, blocks in _admitted(output):
            # A load that failed may have taken back tokens, too.
            count = min(tokens.pop(request, 0), computed)
            for number, (ids, found) in enumerate(zip(blocks, joined, strict=True)):
                found.update(ids[: -(-count // block_tokens(manager, number))])
        for request in output.finished_req_ids:
            tokens.pop(request, None)
        for number, found in enumerate(joined):
            totals[number] += len(found - copied)
    after = tuple(totals)
    setattr(manager, UNCHANGED, HitBlocks(after, after))
    setattr(output, HITS_ATTRIBUTE, HitBlocks(before, after))


class PrefixHits:
    """Follows scheduler outputs. Blocks that several requests of an output share are shown once."""

    def __init__(self, groups: Sequence[VllmGroup]) -> None:
        self._groups = groups
        self._first: tuple[int, ...] | None = None  # the scheduler's totals when ours were 0
        self._last: tuple[int, ...] | None = None  # its totals that `counted` is of
        # Slots by group name, by the scheduler's count; None = it does not report.
        self.counted: dict[str, int] | None = dict.fromkeys((group.view.name for group in groups), 0)

    def note(self, output: Any) -> None:
        """Take up the scheduler's count."""
        hits: HitBlocks | None = getattr(output, HITS_ATTRIBUTE, None)
        if hits is None:
            self.counted = self._last = None
            return
        if hits.after == self._last:
            return
        self._last = hits.after
        if self._first is None:
            self._first = hits.before
        if self.counted is None:
            self.counted = {}
        for group in self._groups:
            blocks = hits.after[group.number] - self._first[group.number]
            self.counted[group.view.name] = blocks * group.block_slots

    def report(self, output: Any, loaded_from: Mapping[str, int], observer: Observer) -> None:
        """Show the hits of a scheduler output, whose records are complete, where they are compared.

        `loaded_from`: by request, the first token that a connector loads or has loaded.
        """
        if not observer.compares_hits:  # before a forward, listing their slots would delay it for nothing
            return
        hits = [
            (joined, blocks)
            for request, computed, blocks in _admitted(output)
            if (joined := min(computed, loaded_from.get(request, computed)))
        ]
        if not hits:
            return
        left_out = np.fromiter(_copied(output), dtype=np.int64)
        for group in self._groups:
            size = group.block_size
            lists = [blocks[group.number][: -(-tokens // size)] for tokens, blocks in hits]
            found = np.unique(np.concatenate([np.array(ids, dtype=np.int64) for ids in lists]))
            found = np.setdiff1d(found, left_out, assume_unique=True)
            if found.size:
                slots = found[:, None] * group.block_slots + np.arange(group.block_slots)
                observer.hit(group.view.name, torch.from_numpy(slots.reshape(-1)))


def _admitted(output: Any) -> Iterator[tuple[str, int, Sequence[Sequence[int]]]]:
    """Requests that this output starts or resumes: tokens computed before, all blocks by group number."""
    for new in output.scheduled_new_reqs:
        yield new.req_id, int(new.num_computed_tokens), new.block_ids
    cached = output.scheduled_cached_reqs
    if resumed := cached.resumed_req_ids:
        columns = zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True)
        for request, computed, blocks in columns:
            if request in resumed and blocks is not None:
                yield request, int(computed), blocks


def _copied(output: Any) -> set[int]:
    """Blocks whose bytes this step copies from others, which are compared as copies; and the null block."""
    return {NULL_BLOCK, *(pair[1] for pair in output.kv_cache_block_copies or ())}
