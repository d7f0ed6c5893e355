"""Judges loads when they are reported complete: against what was sent, and against what lay there before."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from canary_kernels import layout
from canary_kernels.arrival import Unchanged, judge_arrivals
from canary_kernels.fingerprint import hash_slots
from canary_kernels.hashing import sealed_arrays
from canary_obs.engine_api.loads import ArrivedBlocks, LoadedBlocks
from canary_obs.runtime.device.state import DeviceState, Group
from canary_obs.runtime.evidence.history import SlotHistory
from canary_obs.runtime.transfer import BlockFolds
from canary_obs.vocabulary import SlotEventKind

_STATE_SHIFT, _POSITION_SHIFT = 32, 32 + layout.STATE_BITS
# By exclusive or, as layout.PENDING_TO_COMPLETE.
_COMPLETE_TO_BASELINE = layout.sealed((layout.RecordState.COMPLETE ^ layout.RecordState.BASELINE) << 32)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Begun:
    """A load under way."""

    slots: Tensor  # int64 [blocks, size]
    old: Tensor  # int64 [blocks, size, RECORD_WORDS]: what was known of these slots before it
    identities: Tensor | None  # int64 [blocks, size, 2]: IDENTITY and CHAIN of COMPLETE records


class Loads:
    """The loads under way, by name and group. Launches only."""

    def __init__(self, state: DeviceState, history: SlotHistory) -> None:
        self._state, self._history = state, history
        self._begun: dict[tuple[str, str], _Begun] = {}
        self._folds = BlockFolds()
        self._held = [_parts_held(group) for group in state.groups]  # int64 [2]: 1 = the group has the part

    def begin(self, load: str, name: str, blocks: LoadedBlocks, step: int) -> None:
        """Keep what is known of the blocks' slots; they are AWAITED from now on."""
        (group,) = self._state.named((name,))
        device = group.memory.device
        slots = blocks.slots.to(device, non_blocking=True)
        flat = slots.flatten()
        identities = _identities(blocks)
        self._begun[load, name] = _Begun(
            slots=slots,
            old=group.records_of(flat).view(*slots.shape, layout.RECORD_WORDS),
            identities=None if identities is None else identities.to(device, non_blocking=True),
        )
        group.await_bytes(flat)
        self._history.record_announcement(SlotEventKind.AWAITED, group, flat, step)

    def end(self, load: str, name: str, arrived: ArrivedBlocks, step: int) -> None:
        """Judge the slots that have arrived; those that equal what was sent are COMPLETE from now on.

        The others get a baseline. What has not arrived stays AWAITED. Nothing if the load was not begun.
        """
        begun = self._begun.pop((load, name), None)
        if begun is None:
            return
        (group,) = self._state.named((name,))
        device = group.memory.device
        first, stop = (edge.to(device, non_blocking=True) for edge in (arrived.first, arrived.stop))
        offsets = torch.arange(begun.slots.shape[1], device=device)
        within = (offsets >= first[:, None]) & (offsets < stop[:, None])
        slots = torch.where(within, begun.slots, -1)
        if group.plan.coverage is layout.RealData.NONE or begun.identities is None:
            group.receive(slots.flatten())
        else:
            self._state.tick()
            self._state.arrivals.compared(self._state.now, arrived.peer, load)
            now = hash_slots(group.backend, group.plan, begun.slots.flatten()).view(*slots.shape, 2)
            matched = self._judge(group, begun, now, within, arrived)
            identity, chain = begun.identities.unbind(-1)
            identity = identity ^ torch.where(matched[:, None] != 0, 0, _COMPLETE_TO_BASELINE)
            records = torch.cat((torch.stack((identity, chain), -1), now), -1)
            group.store(slots.flatten(), records.view(-1, layout.RECORD_WORDS))
        self._history.record_announcement(SlotEventKind.RECEIVED, group, slots.flatten(), step)

    def fail(self, load: str, step: int) -> None:
        """This load has failed: what lies in its slots is nothing, and must be written before it is read."""
        for key in [key for key in self._begun if key[0] == load]:
            (group,) = self._state.named((key[1],))
            slots = self._begun.pop(key).slots.flatten()
            group.forget(slots)
            self._history.record_announcement(SlotEventKind.INVALIDATED, group, slots, step)

    def drop(self, load: str) -> None:
        """Nobody will report on this load any more."""
        for key in [key for key in self._begun if key[0] == load]:
            del self._begun[key]

    def _judge(
        self, group: Group, begun: _Begun, now: Tensor, within: Tensor, arrived: ArrivedBlocks
    ) -> Tensor:
        """int64 [blocks]: 1 = equal to one of the copies; now: int64 [blocks, size, 2]."""
        assert begun.identities is not None
        identity, device = begun.identities[:, :, 0], now.device
        slots = torch.where(arrived.copies > 0, arrived.filled, (arrived.stop - arrived.first).clamp(min=0))
        self._state.owed.compared(group.index, layout.Phase.HEAD, int(slots.sum()))
        facts = torch.stack((slots, arrived.copies, arrived.filled)).to(device, non_blocking=True)
        copies, filled = facts[1, :, None], facts[2, :, None]
        compared = torch.where(copies > 0, torch.arange(now.shape[1], device=device) < filled, within)
        folds = self._folds.fold(torch.where(compared[:, :, None], now, 0))
        unchanged = _unchanged(begun.old, identity, now, within) * self._held[group.index]
        columns = begun.slots[:, :1], _positions(identity[:, :1]), facts[:2].T, unchanged, folds
        sent = arrived.sent.to(device, non_blocking=True)
        return judge_arrivals(group.backend, group.buffers, torch.cat(columns, 1), sent)


def _identities(blocks: LoadedBlocks) -> Tensor | None:
    """int64 [blocks, size, 2], on the CPU: IDENTITY, COMPLETE, and CHAIN of what the blocks are to hold."""
    if blocks.tokens is None or blocks.positions is None or blocks.chains is None:
        return None
    token = blocks.tokens.numpy() & layout.TOKEN_MASK
    state = blocks.positions.numpy() << layout.STATE_BITS | int(layout.RecordState.COMPLETE)
    chain = blocks.chains.numpy()
    identity = sealed_arrays((token | state << _STATE_SHIFT).ravel(), chain.ravel())
    return torch.stack((torch.from_numpy(identity).view(blocks.tokens.shape), blocks.chains), -1)


def _positions(identities: Tensor) -> Tensor:
    return identities >> _POSITION_SHIFT & layout.MAX_POSITION


def _parts_held(group: Group) -> Tensor:
    held = {int(source.part) for source in group.view.sources}
    codes = [int(part in held) for part in (layout.Part.K, layout.Part.V)]
    return torch.tensor(codes, dtype=torch.int64, device=group.memory.device)


def _unchanged(old: Tensor, identity: Tensor, now: Tensor, within: Tensor) -> Tensor:
    """int64 [blocks, 2] of `Unchanged`: of each block and part, from its slots `within`.

    Where nothing is known of a slot, bytes that are all zero are those of a pool that was never written.
    """
    state = old[:, :, layout.IDENTITY] >> _STATE_SHIFT & layout.STATE_MASK
    complete = state == layout.RecordState.COMPLETE
    # A baseline of bytes that were loaded has an identity, one that was taken of unknown bytes has no chain.
    baseline = state == layout.RecordState.BASELINE
    named = complete | (baseline & (old[:, :, layout.CHAIN] != 0))
    differing = old[:, :, layout.IDENTITY] ^ identity
    token = (differing & layout.TOKEN_MASK) != 0
    position = _positions(differing) != 0
    # V does not depend on the position in every model; a token alone may rightly leave zeros.
    replaced = torch.stack((named & (token | position), named & token), -1)
    known = (complete | baseline)[:, :, None]
    zero = (now == 0) & ~known & (_positions(identity) > 0)[:, :, None]
    same = (known & (now == old[:, :, layout.FINGERPRINT_K :])) | zero
    inside = within[:, :, None]
    left = (same | ~known | ~inside).all(1) & (same & inside).any(1)
    wrong = (same & inside & (replaced | zero)).any(1)
    code = torch.where(wrong, int(Unchanged.REPLACED), int(Unchanged.SAME))
    return torch.where(left, code, int(Unchanged.CHANGED))
