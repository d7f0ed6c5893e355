"""One forward as the layers of one ratio see it: which runs it completes, which states it keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from canary_obs.reference_engine.cache.compressed_pool import CompressedPool
from canary_obs.reference_engine.model.compression import Question, attend_entries, chosen_entries, pooled
from canary_obs.reference_engine.model.rotary import Rotary, rotate
from canary_obs.reference_engine.scheduling.request import Request
from canary_obs.reference_engine.to_device import to_device

Longs = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One request's part in a forward. Positions are its own; `start` counts in the flat batch."""

    request: Request
    first: int  # position of its first new token
    last: int  # position after its last
    start: int
    buffer: int  # of the state table, where its incomplete run lies before this forward
    next_buffer: int  # and after it

    @property
    def moves(self) -> bool:
        """Whether this forward completes a run."""
        return self.buffer != self.next_buffer

    def kept(self, ratio: int) -> int:
        """New tokens whose run stays incomplete: the last ones."""
        return self.last - max(self.first, self.last - self.last % ratio)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunBatch:
    """Runs and states of a forward. Host lists go to the device once, when the batch is made."""

    pool: CompressedPool
    spans: tuple[Span, ...]
    entry_slots: Tensor  # int64 [runs]
    first_positions: Tensor  # int64 [runs]; of their tokens
    members: Tensor  # int64 [runs, ratio]; new tokens by place in the batch, then the states read
    read_buffers: Tensor  # int64 [n]; where in the state table the states read lie
    read_places: Tensor  # int64 [n]
    # New tokens whose run stays incomplete: of requests that keep their buffer, then of those that move.
    kept: Tensor  # int64 [kept]; by place in the batch
    kept_slots: Tensor  # int64 [kept]


def plan_runs(pool: CompressedPool, requests: Sequence[Request], extends: Sequence[int]) -> RunBatch:
    """Sort a forward's tokens into runs; moves requests whose run is completed to their other buffer."""
    spans, start = [], 0
    for request, extend in zip(requests, extends, strict=True):
        first, last = request.computed, request.computed + extend
        buffer = int(pool.buffer[request.row])
        moved = first // pool.ratio != last // pool.ratio
        after = buffer ^ moved
        pool.buffer[request.row] = after
        spans.append(
            Span(request=request, first=first, last=last, start=start, buffer=buffer, next_buffer=after)
        )
        start += extend
    return _run_batch(pool, tuple(spans), start)


def _run_batch(pool: CompressedPool, spans: tuple[Span, ...], num_tokens: int) -> RunBatch:
    ratio, device = pool.ratio, pool.page_table.device
    members, slots, positions, buffers, places = ([_EMPTY] for _ in range(5))
    kept: dict[bool, list[Longs]] = {False: [_EMPTY], True: [_EMPTY]}  # by whether the buffer changes
    kept_slots: dict[bool, list[Longs]] = {False: [_EMPTY], True: [_EMPTY]}
    read = 0
    for span in spans:
        row = 2 * span.request.row
        whole = span.last - span.last % ratio
        incomplete = span.first - span.first % ratio
        if whole > span.first:
            before = span.first - incomplete
            own = np.arange(span.start, span.start + whole - span.first)
            joined = np.concatenate([np.arange(num_tokens + read, num_tokens + read + before), own])
            members.append(joined)
            positions.append(np.arange(incomplete, whole, ratio))
            slots.append(span.request.slots[incomplete + ratio - 1 : whole : ratio] // ratio)
            buffers.append(np.full(before, row + span.buffer))
            places.append(np.arange(before))
            read += before
        keep = np.arange(span.last - span.kept(ratio), span.last)
        kept[span.moves].append(keep - span.first + span.start)
        kept_slots[span.moves].append((row + span.next_buffer) * ratio + keep % ratio)

    def joined_on_device(parts: list[Longs]) -> Tensor:
        return to_device(np.concatenate(parts), device)

    return RunBatch(
        pool=pool,
        spans=spans,
        entry_slots=joined_on_device(slots),
        first_positions=joined_on_device(positions),
        members=joined_on_device(members).view(-1, ratio),
        read_buffers=joined_on_device(buffers),
        read_places=joined_on_device(places),
        kept=joined_on_device(kept[False] + kept[True]),
        kept_slots=joined_on_device(kept_slots[False] + kept_slots[True]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The entries that one request's new tokens may read: of its runs that are complete after the forward."""

    tokens: slice  # places in the flat batch
    entries: slice  # places among all entries read
    seen: Tensor  # bool [tokens, entries]; complete at that token


class EntryMetadata:
    """Compress: stores states and entries of a batch in the pools, and attends through the tables."""

    def __init__(self, batches: Sequence[RunBatch], rotary: Rotary) -> None:
        self._rotary = rotary
        self._batches = {layer: batch for batch in batches for layer in batch.pool.layers}
        self._read = {batch.pool.ratio: _readings(batch) for batch in batches}

    def __call__(self, layer: int, states: Tensor, question: Question) -> Tensor:
        """states [tokens, state size] -> [tokens, heads, rank]."""
        batch = self._batches[layer]
        pool, held = batch.pool, batch.pool.held_as[layer]
        if batch.entry_slots.numel():
            self._complete(batch, held, states)
        pool.states.write(held, batch.kept_slots, states[batch.kept])
        slots, readings = self._read[pool.ratio]
        query = question.query
        mixed = query.new_zeros((*query.shape[:2], pool.sizes.rank))
        if not readings:
            return mixed
        entries = pool.entries.read(held, slots).to(query.dtype)
        keys = None if pool.index is None else pool.index.read(held, slots).to(query.dtype)
        for reading in readings:
            mine, seen = question.of(reading.tokens), reading.seen
            if keys is not None:
                seen = chosen_entries(mine, keys[reading.entries], seen, pool.sizes.top_k)
            found = attend_entries(mine.query, entries[reading.entries], seen, pool.sizes.rank)
            mixed[reading.tokens] = found
        return mixed

    def _complete(self, batch: RunBatch, held: int, states: Tensor) -> None:
        pool, sizes = batch.pool, batch.pool.sizes
        earlier = pool.states.read(held, pool.state_slots(batch.read_buffers, batch.read_places))
        rows = pooled(torch.cat([states.float(), earlier])[batch.members])
        rotation = self._rotary.at(batch.first_positions)
        rotary_part = rotate(rows[:, sizes.rank :].reshape(rows.shape[0], -1, sizes.rope), rotation)
        entries = torch.cat([rows[:, : sizes.rank], rotary_part[:, 0]], dim=1)
        pool.entries.write(held, batch.entry_slots, entries)
        if pool.index is not None:
            pool.index.write(held, batch.entry_slots, rotary_part[:, 1])


def _readings(batch: RunBatch) -> tuple[Tensor, tuple[Reading, ...]]:
    """Slots of every entry that a forward reads, int64 [n], and which of them are whose."""
    pool, readings, slots, first = batch.pool, [], [], 0
    for span in batch.spans:
        count = span.last // pool.ratio
        if not count:
            continue
        slots.append(pool.slots_of(span.request.row, count))
        order = torch.arange(span.last, device=batch.kept.device)
        readings.append(
            Reading(
                tokens=slice(span.start, span.start + span.last - span.first),
                entries=slice(first, first + count),
                seen=(order[:count] + 1) * pool.ratio <= order[span.first :, None] + 1,
            )
        )
        first += count
    return torch.cat(slots) if slots else batch.kept_slots[:0], tuple(readings)


_EMPTY = np.empty(0, dtype=np.int64)
