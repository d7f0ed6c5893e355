"""Groups of compressed entries, index keys and compression states."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from canary_kernels.buffers import KVSource
from canary_kernels.hashing import chain_of
from canary_obs.engine_api.views import CachedCount, CachedSlots, GroupStep, GroupTokens, GroupView
from canary_obs.engines.reference.digests import PrefixDigests
from canary_obs.engines.toolkit.surrogate_tokens import surrogate_tokens
from canary_obs.reference_engine.cache.compressed_pool import CompressedPool
from canary_obs.reference_engine.cache.connector import entry_slots
from canary_obs.reference_engine.cache.entry_rows import EntryRows, IndexRows, StateRows
from canary_obs.reference_engine.cache.radix_cache import RadixCache
from canary_obs.reference_engine.engine import Engine
from canary_obs.reference_engine.execution.batch import ForwardBatch
from canary_obs.reference_engine.execution.runs import RunBatch, Span
from canary_obs.reference_engine.scheduling.request import Request
from canary_obs.reference_engine.to_device import to_device


class EntryTokens:
    """The entries of one ratio that a forward completes; each has the surrogate token of its run."""

    def __init__(self, engine: Engine, pool: CompressedPool) -> None:
        self.pool = pool
        self._digests = PrefixDigests(engine.config.max_running, pool.ratio)
        self._last: tuple[ForwardBatch, GroupStep] | None = None

    def step(self, batch: ForwardBatch) -> GroupStep:
        """Slots and tokens of the entries; built once per forward for all groups of a ratio."""
        if self._last is None or self._last[0] is not batch:
            self._last = batch, self._step(batch)
        return self._last[1]

    def _step(self, batch: ForwardBatch) -> GroupStep:
        pool, ratio = self.pool, self.pool.ratio
        runs, device = _runs_of(batch, pool), batch.rows.device
        before = [span.first // ratio for span in runs.spans]
        extends = [span.last // ratio - span.first // ratio for span in runs.spans]
        ids = np.concatenate([_EMPTY, *(_entry_ids(span, ratio) for span in runs.spans)])
        digests = self._digests.advance(batch.requests).tolist()
        tokens = _group_tokens(before, extends, ids, digests, device)
        return GroupStep(slot_table=pool.page_table, out_slots=runs.entry_slots, tokens=tokens)


class EntryGroup:
    """Entries or index keys: one slot per run of tokens, in the page of the run."""

    def __init__(self, engine: Engine, tokens: EntryTokens, rows: EntryRows | IndexRows, name: str) -> None:
        pool = tokens.pool
        self._engine, self._pool, self._tokens, self._mark = engine, pool, tokens, -1
        self.numbering, self.ratio = entry_slots(pool.ratio), pool.ratio
        self.view = GroupView(
            name=name, num_slots=pool.num_entries, page_size=pool.per_page, sources=_sources(pool, rows)
        )

    def step(self, batch: ForwardBatch) -> GroupStep:
        """The entries that a forward completes."""
        return self._tokens.step(batch)

    def cached(self, *, unlocked_only: bool) -> CachedSlots:
        """Entries of the runs in the radix cache, which holds whole pages, so whole runs."""
        cache, ratio = self._cache, self._pool.ratio
        self._mark = cache.clock
        held = cache.held(unlocked_only=unlocked_only)
        ends = held[held % ratio == ratio - 1]
        before = cache.previous[ends - (ratio - 1)]
        return CachedSlots(
            slots=torch.from_numpy(ends // ratio),
            positions=torch.from_numpy(cache.position[ends] // ratio),
            previous=torch.from_numpy(np.where(before >= 0, before // ratio, -1)),
        )

    def count(self) -> CachedCount:
        """What the radix tree counts, in entries."""
        ratio = self._pool.ratio
        return CachedCount(slots=self._cache.size // ratio, removed=self._cache.removed // ratio)

    def still_cached(self, slots: Tensor) -> Tensor:
        """bool [n]: cached, without a break, since the last `cached` call."""
        return torch.from_numpy(self._cache.inserted_at[slots.numpy() * self._pool.ratio] <= self._mark)

    def in_use(self) -> Tensor:
        """int64 [n] on the CPU: entries of running requests and of the prefix cache."""
        own = [self._entries_of(request) for request in self._engine.scheduler.running]
        return torch.from_numpy(np.unique(np.concatenate([*own, self._cache.held() // self._pool.ratio])))

    def joined(self, request: Request) -> NDArray[np.int64]:
        """int64 [n]: entries of the prefix that a request was admitted with, which has whole runs."""
        ratio = self._pool.ratio
        return request.slots[ratio - 1 : request.shared : ratio] // ratio

    def num_joined(self) -> int:
        """The engine's own total, in entries."""
        return self._engine.statistics.prefix_hit_tokens // self._pool.ratio

    def holders(self, slot: int) -> tuple[str, ...]:
        """Running requests with the slot among the entries they have completed."""
        running = self._engine.scheduler.running
        return tuple(request.id for request in running if slot in self._entries_of(request))

    @property
    def _cache(self) -> RadixCache:
        return self._engine.scheduler.cache

    def _entries_of(self, request: Request) -> NDArray[np.int64]:
        ratio = self._pool.ratio
        return request.slots[ratio - 1 : request.computed : ratio] // ratio


class StateGroup:
    """Compression states: one slot per token of each running request's incomplete run.

    Every run is a sequence of its own. A forward may read the states of one run and write those of the next,
    so each request is listed twice: with the run it was in, then with the run it is in now.
    """

    numbering = None

    def __init__(self, engine: Engine, pool: CompressedPool, name: str) -> None:
        self._engine, self._pool, self.ratio = engine, pool, pool.ratio
        sources = _sources(pool, pool.states)
        self.view = GroupView(name=name, num_slots=pool.num_states, page_size=1, sources=sources)

    def step(self, batch: ForwardBatch) -> GroupStep:
        """The states that a forward reads and keeps."""
        pool, runs = self._pool, _runs_of(batch, self._pool)
        ratio, spans = pool.ratio, runs.spans
        none, before = [0] * len(spans), [span.first % ratio for span in spans]
        moving = [span for span in spans if span.moves]
        staying = [span for span in spans if not span.moves]
        kept = [span.kept(ratio) for span in spans]
        extends = [0 if span.moves else n for span, n in zip(spans, kept, strict=True)]
        extends += [n if span.moves else 0 for span, n in zip(spans, kept, strict=True)]
        ids = np.concatenate([_EMPTY, *(_kept_ids(span, ratio) for span in staying + moving)])
        digests = [_state_digest(span, ratio) for span in spans] + none
        rows = [2 * span.request.row + span.buffer for span in spans]
        rows += [2 * span.request.row + span.next_buffer if span.moves else -1 for span in spans]
        tokens = _group_tokens(before + none, extends, ids, digests, batch.rows.device, rows)
        return GroupStep(slot_table=pool.state_table, out_slots=runs.kept_slots, tokens=tokens)

    def cached(self, *, unlocked_only: bool) -> CachedSlots:
        """Nothing: the cache holds whole runs, and states belong to incomplete ones."""
        del unlocked_only
        nothing = torch.empty(0, dtype=torch.int64)
        return CachedSlots(slots=nothing, positions=nothing, previous=nothing)

    def count(self) -> CachedCount:
        """None: the cache holds whole runs."""
        return CachedCount(slots=0, removed=0)

    def still_cached(self, slots: Tensor) -> Tensor:
        """bool [n]: False, as nothing is cached."""
        return torch.zeros(slots.shape[0], dtype=torch.bool)

    def in_use(self) -> Tensor:
        """int64 [n] on the CPU: states of running requests' incomplete runs."""
        own = [self._slots_of(request) for request in self._engine.scheduler.running]
        return torch.from_numpy(np.concatenate([_EMPTY, *own]))

    def joined(self, request: Request) -> NDArray[np.int64]:
        """int64 [0]: a prefix from the cache has no incomplete run."""
        del request
        return _EMPTY

    def num_joined(self) -> int:
        """None are cached."""
        return 0

    def holders(self, slot: int) -> tuple[str, ...]:
        """The running request whose incomplete run has the slot."""
        running = self._engine.scheduler.running
        return tuple(request.id for request in running if slot in self._slots_of(request))

    def _slots_of(self, request: Request) -> NDArray[np.int64]:
        ratio = self._pool.ratio
        first = (2 * request.row + int(self._pool.buffer[request.row])) * ratio
        return np.arange(first, first + request.computed % ratio)


def compressed_groups(engine: Engine) -> tuple[EntryGroup | StateGroup, ...]:
    """The groups of every ratio: entries, index keys where there is an indexer, states."""
    found: list[EntryGroup | StateGroup] = []
    for pool in engine.runner.pool.compressed:
        tokens, name = EntryTokens(engine, pool), f"c{pool.ratio}"
        found.append(EntryGroup(engine, tokens, pool.entries, name))
        if pool.index is not None:
            found.append(EntryGroup(engine, tokens, pool.index, f"{name}_indexer"))
        found.append(StateGroup(engine, pool, f"{name}_state"))
    return tuple(found)


def _runs_of(batch: ForwardBatch, pool: CompressedPool) -> RunBatch:
    return next(runs for runs in batch.runs if runs.pool is pool)


def _sources(pool: CompressedPool, rows: EntryRows | IndexRows | StateRows) -> tuple[KVSource, ...]:
    return tuple(source for layer, held in pool.held_as.items() for source in rows.sources(held, layer))


def _entry_ids(span: Span, ratio: int) -> NDArray[np.int64]:
    """int64 [n]: surrogate tokens of the runs that a request completes in a forward."""
    first, last = span.first - span.first % ratio, span.last - span.last % ratio
    if last <= span.first:
        return _EMPTY
    return surrogate_tokens(span.request.tokens[first:last], ratio).astype(np.int64)


def _kept_ids(span: Span, ratio: int) -> NDArray[np.int64]:
    return span.request.tokens[span.last - span.kept(ratio) : span.last].astype(np.int64)


def _state_digest(span: Span, ratio: int) -> int:
    """Chain over the states that a request had kept before a forward."""
    held = span.request.tokens[span.first - span.first % ratio : span.first]
    return int(chain_of(torch.from_numpy(held))[-1])


def _group_tokens(
    before: Sequence[int],
    extends: Sequence[int],
    ids: NDArray[np.int64],
    digests: Sequence[int],
    device: torch.device,
    rows: Sequence[int] | None = None,
) -> GroupTokens:
    prefixes, counts = np.array(before, dtype=np.int64), np.array(extends, dtype=np.int64)
    starts = np.zeros(prefixes.size + 1, dtype=np.int64)
    np.cumsum(counts, out=starts[1:])
    positions = np.arange(starts[-1]) - np.repeat(starts[:-1] - prefixes, counts)
    return GroupTokens(
        prefix_lens=to_device(prefixes, device),
        extend_lens=to_device(counts, device),
        token_starts=to_device(starts, device),
        input_ids=to_device(ids, device),
        positions=to_device(positions, device),
        digests=to_device(np.array(digests, dtype=np.int64), device),
        # The ids are the requests' own tokens already, so they check nothing here. But kernels are compiled
        # at attach for one signature, the same for all groups.
        expected_ids=to_device(ids.astype(np.int32), device),
        rows=None if rows is None else to_device(np.array(rows, dtype=np.int64), device),
    )


_EMPTY = np.empty(0, dtype=np.int64)
