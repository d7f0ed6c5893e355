"""Faults of every reason, planted in a running engine: each is a bug an engine could have."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch

from canary_kernels import layout
from canary_kernels.layout import Reason, RecordState
from canary_obs.reference_engine.execution.runner import ForwardBatch, Runner
from canary_obs.reference_engine.scheduling.scheduler import Plan
from canary_obs.runtime.device.byte_address import locate_byte
from tests.gpu.rig import Rig

GROUP = "full"
_PATIENCE = 100  # steps until a fault must have been seen
_ATTEMPTS = 200  # steps until one must have found a place


def nothing() -> None:
    """Nothing to undo."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planted:
    """A fault in place: the slots it has spoiled for good, what follows its forward, what ends it."""

    slots: list[int]
    forwarded: Callable[[], None] = nothing
    stepped: Callable[[], None] = nothing
    seen: Callable[[], None] = nothing


Planter = Callable[[Rig, ForwardBatch, random.Random], Planted | None]


class FaultyRunner(Runner):
    """Lets a fault into the batch, and into what the forward leaves."""

    plant: Callable[[ForwardBatch], Planted | None] | None = None
    planted: Planted | None = None
    _under_way = False  # in the step whose forward the fault is for

    def prepare(self, plan: Plan) -> ForwardBatch:
        batch = super().prepare(plan)
        if self.plant is not None and self.planted is None:
            self.planted = self.plant(batch)
        return batch

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        logits = super().forward(batch)
        if self.planted is not None and self.plant is not None:
            self.planted.forwarded()
            self.plant, self._under_way = None, True
        return logits

    def sample(self, batch: ForwardBatch, logits: torch.Tensor) -> list[int | None]:
        tokens = super().sample(batch, logits)
        if self.planted is not None and self._under_way:
            torch.cuda.synchronize()  # the checks of the step have seen it
            self.planted.stepped()
            self._under_way = False
        return tokens


def _record(rig: Rig, slot: int) -> list[int]:
    found: list[int] = rig.canary.state.groups[0].buffers.records[slot].tolist()
    return found


def _complete(record: list[int]) -> bool:
    return (record[layout.IDENTITY] >> 32) & layout.STATE_MASK == RecordState.COMPLETE


def _prefix(batch: ForwardBatch, draw: random.Random, least: int = 8) -> tuple[int, int] | None:
    """A request of the batch with a prefix of some length: its index and a position of the prefix."""
    fit = [index for index, length in enumerate(batch.prefixes) if length >= least]
    if not fit:
        return None
    index = draw.choice(fit)
    return index, draw.randrange(1, batch.prefixes[index] - 1)


def _redirect(rig: Rig, batch: ForwardBatch, index: int, position: int, slot: int) -> Planted:
    """The table leads to another slot for one forward."""
    table, row = rig.engine.runner.pool.req_to_token, batch.requests[index].row
    right = int(table[row, position])
    table[row, position] = slot

    def back() -> None:
        table[row, position] = right

    return Planted(slots=[], stepped=back)


def chain(rig: Rig, batch: ForwardBatch, draw: random.Random) -> Planted | None:
    """A page of another request, at the same position."""
    found, other = _prefix(batch, draw), _prefix(batch, draw)
    if found is None or other is None:
        return None
    (index, position), (other_index, _) = found, other
    if position >= batch.prefixes[other_index]:
        return None
    mine, theirs = (batch.requests[i].slots for i in (index, other_index))
    records = [_record(rig, int(slot)) for slot in (mine[position - 1], mine[position], theirs[position])]
    if not all(map(_complete, records)) or records[1][layout.CHAIN] == records[2][layout.CHAIN]:
        return None
    return _redirect(rig, batch, index, position, int(theirs[position]))


def position(rig: Rig, batch: ForwardBatch, draw: random.Random) -> Planted | None:
    """A slot of the same request, one position off."""
    found = _prefix(batch, draw)
    if found is None:
        return None
    index, place = found
    slot = int(batch.requests[index].slots[place + 1])
    return _redirect(rig, batch, index, place, slot) if _complete(_record(rig, slot)) else None


def token(rig: Rig, batch: ForwardBatch, draw: random.Random) -> Planted | None:
    """The engine's own token list loses a token after its KV was computed."""
    found = _prefix(batch, draw)
    if found is None:
        return None
    request, last = batch.requests[found[0]], batch.prefixes[found[0]] - 1
    if not _complete(_record(rig, int(request.slots[last]))):
        return None
    right, owner, row = int(request.tokens[last]), rig.canary._adapter._digests._owner, request.row
    request.tokens[last] = right ^ 1
    owner[row] = -1  # as if the digest were taken from the list anew

    def back() -> None:
        request.tokens[last] = right
        owner[row] = -1

    start, stop = batch.prefixes[found[0]], batch.prefixes[found[0]] + batch.extends[found[0]]
    return Planted(slots=request.slots[start:stop].tolist(), seen=back)


def kv_data(rig: Rig, batch: ForwardBatch, draw: random.Random) -> Planted | None:
    """A bit of a slot in use turns over."""
    found = _prefix(batch, draw)
    if found is None:
        return None
    slot = int(batch.requests[found[0]].slots[found[1]])
    if not _complete(_record(rig, slot)):
        return None
    source = draw.choice(rig.canary.state.groups[0].view.sources)
    locate_byte(source, slot, draw.randrange(source.slot_bytes)).flip(1 << draw.randrange(8))
    return Planted(slots=[slot])


def _new_token(batch: ForwardBatch, draw: random.Random) -> tuple[int, list[int]]:
    """A new token: its place in the batch, and the slots from its own to the last of its request."""
    index = draw.randrange(len(batch.extends))
    start, offset = sum(batch.extends[:index]), draw.randrange(batch.extends[index])
    return start + offset, batch.out_slots[start + offset : start + batch.extends[index]].tolist()


def write_token(rig: Rig, batch: ForwardBatch, draw: random.Random) -> Planted | None:
    """The model is given another token than the engine's list has."""
    place, slots = _new_token(batch, draw)
    batch.input_ids[place] ^= 1
    return Planted(slots=slots)


def write_position(rig: Rig, batch: ForwardBatch, draw: random.Random) -> Planted | None:
    """The model is given a position one too small."""
    place, slots = _new_token(batch, draw)
    if int(batch.positions[place]) == 0:
        return None
    batch.positions[place] -= 1
    return Planted(slots=slots)


def unwritten(rig: Rig, batch: ForwardBatch, draw: random.Random) -> Planted | None:
    """The engine gives a slot up and goes on using it."""
    found = _prefix(batch, draw)
    if found is None:
        return None
    slot = int(batch.requests[found[0]].slots[found[1]])
    rig.canary.invalidated(GROUP, torch.tensor([slot], device=batch.rows.device))
    return Planted(slots=[slot])


def lost_write(rig: Rig, batch: ForwardBatch, draw: random.Random) -> Planted | None:
    """The forward leaves a reused slot as it was."""
    place, (slot, *_) = _new_token(batch, draw)
    old, kv = _record(rig, slot), rig.engine.runner.pool.kv
    same = (old[layout.IDENTITY] & 0xFFFFFFFF) == int(batch.input_ids[place])
    if not _complete(old) or same:
        return None
    kept = kv[:, :, slot].clone()
    return Planted(slots=[slot], forwarded=lambda: kv[:, :, slot].copy_(kept))


PLANTERS: dict[Reason, Planter] = {
    Reason.CHAIN: chain,
    Reason.POSITION: position,
    Reason.TOKEN: token,
    Reason.KV_DATA: kv_data,
    Reason.WRITE_TOKEN: write_token,
    Reason.WRITE_POSITION: write_position,
    Reason.UNWRITTEN: unwritten,
    Reason.LOST_WRITE: lost_write,
}


def counted(rig: Rig) -> list[int]:
    """Violations of each reason so far; waits for the device."""
    lanes = rig.canary.state.counters.view(-1, layout.COUNTER_WORDS)[:, : layout.NUM_LANES].sum(0)
    found: list[int] = lanes.view(layout.NUM_PHASES, layout.NUM_REASONS).sum(0).tolist()
    return found


def plant(rig: Rig, reason: Reason, draw: random.Random) -> int | None:
    """One fault, until it is counted under its reason; returns how many steps that took, None = never."""
    runner = rig.engine.runner
    assert isinstance(runner, FaultyRunner)
    runner.planted, runner.plant = None, lambda batch: PLANTERS[reason](rig, batch, draw)
    before = counted(rig)[reason]
    for _ in range(_ATTEMPTS):
        rig.run(1)
        if runner.planted is not None:
            break
    planted = runner.planted
    assert planted is not None, f"no place for {reason.name} in {_ATTEMPTS} steps"
    steps: int | None = 0
    while counted(rig)[reason] == before:
        if steps == _PATIENCE:
            steps = None
            break
        rig.run(1)
        steps += 1
    planted.seen()
    if planted.slots:
        rig.canary.received(GROUP, torch.tensor(planted.slots, device=runner.device))
    return steps
