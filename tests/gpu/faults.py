"""Faults of every reason, injected into a running engine: each is a bug that an engine could have."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch

from canary_kernels import layout
from canary_kernels.layout import Reason, RecordState
from canary_obs.engine_api.loads import ArrivedBlocks, LoadedBlocks
from canary_obs.reference_engine.execution.batch import ForwardBatch
from canary_obs.reference_engine.execution.runner import Runner
from canary_obs.reference_engine.scheduling.scheduler import Plan
from canary_obs.runtime.device.byte_address import locate_byte
from tests.gpu.rig import Rig

GROUP = "full"
_DETECTION_STEPS = 100  # within which a fault must be counted
_INJECTION_STEPS = 200  # within which a batch must fit a fault


def nothing() -> None:
    """Nothing to undo."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """An injected fault, and how it is restored."""

    slots: list[int]  # that stay corrupt
    after_forward: Callable[[], None] = nothing
    after_step: Callable[[], None] = nothing
    restore: Callable[[], None] = nothing  # once it was counted


MakeFault = Callable[[Rig, ForwardBatch, random.Random], Fault | None]


class FaultyRunner(Runner):
    """Injects a fault into a batch, and into what its forward wrote."""

    make_fault: Callable[[ForwardBatch], Fault | None] | None = None  # None for a batch that does not fit
    fault: Fault | None = None
    _in_step = False  # between the forward with the fault and the end of its step

    def prepare(self, plan: Plan) -> ForwardBatch:
        batch = super().prepare(plan)
        if self.make_fault is not None and self.fault is None:
            self.fault = self.make_fault(batch)
        return batch

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        logits = super().forward(batch)
        if self.fault is not None and self.make_fault is not None:
            self.fault.after_forward()
            self.make_fault, self._in_step = None, True
        return logits

    def sample(self, batch: ForwardBatch, logits: torch.Tensor) -> list[int | None]:
        tokens = super().sample(batch, logits)
        if self.fault is not None and self._in_step:
            torch.cuda.synchronize()  # until the checks of the step have run
            self.fault.after_step()
            self._in_step = False
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


def _redirect(rig: Rig, batch: ForwardBatch, index: int, position: int, slot: int) -> Fault:
    """Let the table point to another slot for one forward."""
    table, row = rig.engine.runner.pool.req_to_token, batch.requests[index].row
    right = int(table[row, position])
    table[row, position] = slot

    def restore() -> None:
        table[row, position] = right

    return Fault(slots=[], after_step=restore)


def chain(rig: Rig, batch: ForwardBatch, draw: random.Random) -> Fault | None:
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


def position(rig: Rig, batch: ForwardBatch, draw: random.Random) -> Fault | None:
    """A slot of the same request, one position off."""
    found = _prefix(batch, draw)
    if found is None:
        return None
    index, place = found
    slot = int(batch.requests[index].slots[place + 1])
    return _redirect(rig, batch, index, place, slot) if _complete(_record(rig, slot)) else None


def token(rig: Rig, batch: ForwardBatch, draw: random.Random) -> Fault | None:
    """A token of the engine's list changes after its KV was computed."""
    found = _prefix(batch, draw)
    if found is None:
        return None
    request, last = batch.requests[found[0]], batch.prefixes[found[0]] - 1
    if not _complete(_record(rig, int(request.slots[last]))):
        return None
    right, owner, row = int(request.tokens[last]), rig.canary._adapter._digests._owner, request.row
    request.tokens[last] = right ^ 1
    owner[row] = -1  # as if the digest were computed from the list again

    def restore() -> None:
        request.tokens[last] = right
        owner[row] = -1

    start, stop = batch.prefixes[found[0]], batch.prefixes[found[0]] + batch.extends[found[0]]
    return Fault(slots=request.slots[start:stop].tolist(), restore=restore)


def kv_data(rig: Rig, batch: ForwardBatch, draw: random.Random) -> Fault | None:
    """A bit flips in a slot in use."""
    found = _prefix(batch, draw)
    if found is None:
        return None
    slot = int(batch.requests[found[0]].slots[found[1]])
    if not _complete(_record(rig, slot)):
        return None
    source = draw.choice(rig.canary.state.groups[0].view.sources)
    locate_byte(source, slot, draw.randrange(source.slot_bytes)).flip(1 << draw.randrange(8))
    return Fault(slots=[slot])


def _new_token(batch: ForwardBatch, draw: random.Random) -> tuple[int, list[int]]:
    """A new token: its index in the batch, and the slots from its own to the last of its request."""
    index = draw.randrange(len(batch.extends))
    start, offset = sum(batch.extends[:index]), draw.randrange(batch.extends[index])
    return start + offset, batch.out_slots[start + offset : start + batch.extends[index]].tolist()


def write_token(rig: Rig, batch: ForwardBatch, draw: random.Random) -> Fault | None:
    """The model is given another token than the engine's list has."""
    place, slots = _new_token(batch, draw)
    batch.input_ids[place] ^= 1
    return Fault(slots=slots)


def write_position(rig: Rig, batch: ForwardBatch, draw: random.Random) -> Fault | None:
    """The model is given a position one too small."""
    place, slots = _new_token(batch, draw)
    if int(batch.positions[place]) == 0:
        return None
    batch.positions[place] -= 1
    return Fault(slots=slots)


def unwritten(rig: Rig, batch: ForwardBatch, draw: random.Random) -> Fault | None:
    """The engine frees a slot and goes on using it."""
    found = _prefix(batch, draw)
    if found is None:
        return None
    slot = int(batch.requests[found[0]].slots[found[1]])
    rig.canary.invalidated(GROUP, torch.tensor([slot], device=batch.rows.device))
    return Fault(slots=[slot])


def lost_write(rig: Rig, batch: ForwardBatch, draw: random.Random) -> Fault | None:
    """The forward does not write a reused slot."""
    place, (slot, *_) = _new_token(batch, draw)
    old, kv = _record(rig, slot), rig.engine.runner.pool.kv
    same = (old[layout.IDENTITY] & 0xFFFFFFFF) == int(batch.input_ids[place])
    if not _complete(old) or same:
        return None
    kept = kv[:, :, slot].clone()
    return Fault(slots=[slot], after_forward=lambda: kv[:, :, slot].copy_(kept))


def record(rig: Rig, batch: ForwardBatch, draw: random.Random) -> Fault | None:
    """A bit of a record flips: its state, its position, its token, its check or its chain."""
    found = _prefix(batch, draw)
    if found is None:
        return None
    slot, bit = int(batch.requests[found[0]].slots[found[1]]), draw.randrange(128)
    if not _complete(_record(rig, slot)):
        return None
    rig.canary.state.groups[0].buffers.records[slot, bit // 64] ^= layout.signed(1 << bit % 64)
    return Fault(slots=[slot])


def lost_load(rig: Rig, batch: ForwardBatch, draw: random.Random) -> Fault | None:
    """A load of other tokens is reported complete, and nothing has been copied."""
    found = _prefix(batch, draw)
    if found is None:
        return None
    slot = int(batch.requests[found[0]].slots[found[1]])
    old = _record(rig, slot)
    if not _complete(old):
        return None
    token = (int(old[layout.IDENTITY]) & 0xFFFF) ^ 1
    one = torch.ones(1, dtype=torch.int64)
    blocks = LoadedBlocks(
        slots=one[None] * slot, tokens=one[None] * token, positions=one[None], chains=one[None]
    )
    arrived = ArrivedBlocks(
        first=0 * one, stop=one, copies=0 * one, filled=0 * one, sent=one.new_zeros(1, 0, 2)
    )
    rig.canary.load_begun("lost", GROUP, blocks)
    rig.canary.load_ended("lost", GROUP, arrived)
    return Fault(slots=[slot])


FAULTS: dict[Reason, MakeFault] = {
    Reason.CHAIN: chain,
    Reason.POSITION: position,
    Reason.TOKEN: token,
    Reason.KV_DATA: kv_data,
    Reason.WRITE_TOKEN: write_token,
    Reason.WRITE_POSITION: write_position,
    Reason.UNWRITTEN: unwritten,
    Reason.LOST_WRITE: lost_write,
    Reason.RECORD: record,
    Reason.LOST_LOAD: lost_load,
}


def counted(rig: Rig) -> list[int]:
    """Violations of each reason so far; waits for the device."""
    lanes = rig.canary.state.counters.view(-1, layout.COUNTER_WORDS)[:, : layout.NUM_LANES].sum(0)
    found: list[int] = lanes.view(layout.NUM_PHASES, layout.NUM_REASONS).sum(0).tolist()
    return found


def inject(rig: Rig, reason: Reason, draw: random.Random) -> int | None:
    """Inject one fault and run until it is counted under its reason; returns the steps, None = never."""
    runner = rig.engine.runner
    assert isinstance(runner, FaultyRunner)
    runner.fault, runner.make_fault = None, lambda batch: FAULTS[reason](rig, batch, draw)
    before = counted(rig)[reason]
    for _ in range(_INJECTION_STEPS):
        rig.run(1)
        if runner.fault is not None:
            break
    fault = runner.fault
    assert fault is not None, f"no batch fits a fault of {reason.name} within {_INJECTION_STEPS} steps"
    steps: int | None = 0
    while counted(rig)[reason] == before:
        if steps == _DETECTION_STEPS:
            steps = None
            break
        rig.run(1)
        steps += 1
    fault.restore()
    if fault.slots:
        rig.canary.received(GROUP, torch.tensor(fault.slots, device=runner.device))
    return steps
