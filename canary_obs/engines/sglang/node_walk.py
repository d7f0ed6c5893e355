"""Walks over the nodes of a radix tree, whose slots lie on the engine's device: some at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from canary_obs.engine_api.views import CachedSlots
from canary_obs.engine_api.walks import CachedWalk, WholeWalk
from canary_obs.engines.sglang.freed_slots import FreedSlots
from canary_obs.engines.toolkit.forward_stream import ForwardStream

# Slots and nodes of a piece: a step pays for the launch of one and the arithmetic of another.
PIECE_SLOTS, _PIECE_NODES = 4096, 64
_AHEAD = 6  # pieces on their way to the host
_MOST_WAITS = 16  # for frees: with some in every step, there are always new ones on their way

_Longs = NDArray[np.int64]


class _Row(NamedTuple):
    """Memory for one piece."""

    joined: Tensor  # int64 [PIECE_SLOTS] on the device
    host: Tensor  # pinned; the same memory on a CPU
    arrived: torch.Event | None  # None on a CPU


class SlotCopies:
    """Brings pieces of slots to the host, in order with what the scheduler launches, and waits for none."""

    def __init__(self, device: torch.device, scheduler: ForwardStream) -> None:
        """`scheduler`: its stream."""
        self._scheduler = scheduler
        self._rows = deque[_Row]()
        for _ in range(_AHEAD):
            joined = torch.empty(PIECE_SLOTS, dtype=torch.int64, device=device)
            if device.type == "cpu":
                self._rows.append(_Row(joined, joined, None))
            else:
                host = torch.empty(PIECE_SLOTS, dtype=torch.int64, pin_memory=True)
                self._rows.append(_Row(joined, host, torch.Event(device)))

    def start(self, values: Sequence[Tensor], count: int) -> _Row:
        """Copy integers on the device, `count` in all; of _AHEAD copies the oldest must have been read."""
        row = self._rows[0]
        self._rows.rotate(-1)
        with self._scheduler.entered():  # it may have yet to run what makes the values
            if values:
                torch.cat(tuple(values), out=row.joined[:count])
            if row.arrived is not None:
                row.host[:count].copy_(row.joined[:count], non_blocking=True)
                row.arrived.record()
        return row


class _Part(NamedTuple):
    """Of one node."""

    node: int
    offset: int
    length: int


class NodeWalk(CachedWalk):
    """Links come from the order of the nodes: each after its parent."""

    def __init__(
        self,
        values: Sequence[Tensor],
        parents: Sequence[int],
        copies: SlotCopies,
        freed: FreedSlots,
        tokens: Sequence[int] | None = None,
    ) -> None:
        """Of each node: its slots on the device, and the place of its parent here; -1 = the root.

        `tokens`: of each node, where some have tokens and no slots; None = each has as many as slots.
        """
        self._values, self._parents, self._copies, self._freed = values, parents, copies, freed
        self._lengths = [value.numel() for value in values]
        self._tokens = self._lengths if tokens is None else tokens
        self._total = sum(self._lengths)
        self._node = self._offset = 0  # with which the next piece begins
        self._coming = deque[tuple[list[_Part], int, _Row]]()
        self._piece, self._left = WholeWalk(_none()), 0  # what has arrived, and how much of it is not shown
        # Of each node shown so far: its first position; the last slot of it, or before it.
        self._depths, self._last = list[int](), list[int]()
        self._waits = 0

    @property
    def total(self) -> int:
        """Slots of the whole walk."""
        return self._total

    @property
    def ready(self) -> bool:
        """Whether slots have come, and it is known which were freed meanwhile; launches the next copy."""
        self._launch()
        if not self._left and self._coming:
            arrived = self._coming[0][2].arrived
            if arrived is not None and not arrived.query():
                return False
        self._waits = 0 if self._freed.noted() else self._waits + 1
        return self._waits == 0 or self._waits > _MOST_WAITS

    def take(self, limit: int) -> CachedSlots:
        """The next slots, at most `limit`. Waits for them unless `ready`."""
        while not self._left:
            if not self._coming:
                self._launch()
            if not self._coming:
                return _none()
            parts, self._left, row = self._coming.popleft()
            if row.arrived is not None:
                row.arrived.synchronize()
            # A copy: the row is another piece's soon.
            self._piece = WholeWalk(self._linked(parts, row.host[: self._left].numpy().copy()))
        found = self._piece.take(limit)
        self._left -= found.slots.numel()
        return found

    def at_once(self) -> CachedSlots:
        """All slots of a walk that has shown none. Waits for the device; no piece of another is lost."""
        parts = [_Part(node, 0, length) for node, length in enumerate(self._lengths)]
        slots = torch.cat(tuple(self._values)).cpu().to(torch.int64) if self._total else _none().slots
        return self._linked(parts, slots.numpy())

    def _launch(self) -> None:
        """Begin with the next piece, unless enough are on their way."""
        if len(self._coming) == _AHEAD or self._node == len(self._values):
            return
        parts, values, room = list[_Part](), list[Tensor](), PIECE_SLOTS
        while self._node < len(self._values) and room and len(parts) < _PIECE_NODES:
            node, offset, length = self._node, self._offset, self._lengths[self._node]
            size = min(length - offset, room)
            parts.append(_Part(node, offset, size))
            if size:
                value = self._values[node]
                values.append(value if size == length else value[offset : offset + size])
            room -= size
            self._offset += size
            if self._offset == length:
                self._node, self._offset = node + 1, 0
        count = PIECE_SLOTS - room
        self._coming.append((parts, count, self._copies.start(values, count)))

    def _linked(self, parts: list[_Part], slots: _Longs) -> CachedSlots:
        """Positions and previous slots of a piece."""
        previous, bases = np.empty_like(slots), np.empty(len(parts), dtype=np.int64)
        previous[1:] = slots[:-1]
        start = 0
        for number, (node, offset, length) in enumerate(parts):
            if not offset:
                parent = self._parents[node]
                self._depths.append(0 if parent < 0 else self._depths[parent] + self._tokens[parent])
                # A node without tokens has no last slot; its children, if any, follow what it follows. Those
                # of a node that has tokens and no slots follow nothing.
                alone = parent < 0 or self._tokens[node] > self._lengths[node]
                self._last.append(-1 if alone else self._last[parent])
            bases[number] = self._depths[node] + offset - start
            if length:
                previous[start] = self._last[node]
                start += length
                self._last[node] = int(slots[start - 1])
        positions = np.arange(slots.size) + np.repeat(bases, [part.length for part in parts])
        return CachedSlots(
            slots=torch.from_numpy(slots), positions=torch.from_numpy(positions),
            previous=torch.from_numpy(previous),
        )  # fmt: skip


def _none() -> CachedSlots:
    nothing = torch.zeros(0, dtype=torch.int64)
    return CachedSlots(slots=nothing, positions=nothing, previous=nothing)
