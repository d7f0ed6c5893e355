"""Judges loads when they are reported complete: against what was sent, and against what lay there before."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from canary_kernels import layout
from canary_kernels.arrival import ArrivedLoad, WeighedLoad
from canary_kernels.fingerprint import hash_slots
from canary_kernels.hashing import sealed_arrays
from canary_obs.engine_api.loads import ArrivedBlocks, LoadedBlocks
from canary_obs.runtime.device.state import DeviceState, Group
from canary_obs.runtime.device.uploads import uploaded
from canary_obs.runtime.evidence.history import SlotHistory
from canary_obs.runtime.transfer import FoldKeys
from canary_obs.vocabulary import SlotEventKind

_POLL_SECONDS = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class _Expected:
    """What has arrived, or is to arrive, on the device."""

    arrived: ArrivedBlocks
    edges: Tensor  # int64 [blocks, 4]: first, stop, copies, filled
    sent: Tensor  # int64 [blocks, copies, 2]
    compared: int  # slots


@dataclass(frozen=True, slots=True, kw_only=True)
class _Early:
    """What was hashed and weighed before the load was reported."""

    weighed: WeighedLoad
    done: torch.Event | None  # None = it is over


@dataclass(slots=True, kw_only=True)
class _Begun:
    """A load under way."""

    slots: Tensor  # int64 [blocks, size]
    old: Tensor  # int64 [blocks, size, RECORD_WORDS]: what was known of these slots before it
    identities: Tensor | None  # int64 [blocks, size, 2]: IDENTITY and CHAIN of COMPLETE records
    expected: _Expected | None
    early: _Early | None = None


class Loads:
    """The loads under way, by name and group. Launches only."""

    def __init__(self, state: DeviceState, history: SlotHistory) -> None:
        self._state, self._history = state, history
        device = state.clock.device
        # What is launched there waits for copies, which nothing else should.
        self._stream = torch.Stream(device) if device.type == "cuda" else None
        self._last: torch.Event | None = None  # on it
        self._begun: dict[tuple[str, str], _Begun] = {}
        # What the stream that judged the loads of the last step with any may still read: the stream on which
        # they began would give its memory away.
        self._judged: list[object] = []
        self._judged_in = -1  # the number of that step
        self._keys = FoldKeys()
        self._held = [_parts_held(group) for group in state.groups]  # int64 [2]: 1 = the group has the part

    def begin(self, load: str, name: str, blocks: LoadedBlocks, step: int) -> None:
        """Keep what is known of the blocks' slots; they are AWAITED from now on."""
        (group,) = self._state.named((name,))
        device = group.memory.device
        slots = uploaded(blocks.slots, device)  # what has not arrived is taken out
        flat = slots.flatten()
        identities = _identities(blocks)
        self._begun[load, name] = begun = _Begun(
            slots=slots,
            old=_records_of(group, blocks.slots, flat).view(*slots.shape, layout.RECORD_WORDS),
            identities=None if identities is None else uploaded(identities, device),
            expected=None if blocks.expected is None else _expected(blocks.expected, device),
        )
        group.await_bytes(flat)
        self._history.record_announcement(SlotEventKind.AWAITED, group, flat, step)
        checked = group.plan.coverage is not layout.RealData.NONE and begun.identities is not None
        if blocks.copied and checked and begun.expected is not None:
            begun.early = self._weigh_early(group, begun, begun.expected, blocks.copied)

    def end(self, load: str, name: str, arrived: ArrivedBlocks, step: int) -> None:
        """Judge the slots that have arrived; those that equal what was sent are COMPLETE from now on.

        The others get a baseline. What has not arrived stays AWAITED. Nothing if the load was not begun.
        """
        begun = self._begun.pop((load, name), None)
        if begun is None:
            return
        if step != self._judged_in:
            self._judged_in = step
            self._judged.clear()
        (group,) = self._state.named((name,))
        expected, early = begun.expected, begun.early
        self._judged.append((begun, early))
        if expected is None or expected.arrived is not arrived:
            expected, early = _expected(arrived, group.memory.device), None
        checked = group.plan.coverage is not layout.RealData.NONE
        if checked:
            self._state.tick()
            self._state.arrivals.compared(self._state.now, arrived.peer, load)
            self._state.owed.compared(group.index, layout.Phase.HEAD, expected.compared)
            if early is not None and early.done is not None:
                early.done.wait()
            (self._weigh(group, begun, expected) if early is None else early.weighed).judge()
        if checked and begun.identities is not None:
            slots = begun.slots.flatten()
        else:
            offsets = torch.arange(begun.slots.shape[1], device=group.memory.device)
            within = (offsets >= expected.edges[:, :1]) & (offsets < expected.edges[:, 1:2])
            slots = torch.where(within, begun.slots, -1).flatten()
            group.receive(slots)
        self._history.record_announcement(SlotEventKind.RECEIVED, group, slots, step, stays=True)

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

    def close(self, seconds: float) -> None:
        """Wait for what still reads the engine's memory, which may be given up then.

        Raises TimeoutError if it has not ended after so many seconds.
        """
        self._begun.clear()
        deadline = time.monotonic() + seconds
        while self._last is not None and not self._last.query():
            if time.monotonic() >= deadline:
                raise TimeoutError(
                    f"a load is still to be hashed after {seconds} s; the rule is that nothing reads the KV "
                    "cache of an engine that was detached from; see what the connector's copy waits for"
                )
            time.sleep(_POLL_SECONDS)

    def _weigh_early(
        self, group: Group, begun: _Begun, expected: _Expected, copied: Sequence[torch.Event]
    ) -> _Early:
        """While the copies are made: after them, and after what was launched here, which it reads."""
        if self._stream is None:
            return _Early(weighed=self._weigh(group, begun, expected), done=None)
        device = group.memory.device
        self._keys.of(begun.slots.shape[1], device)  # sent now, not after the copies: other loads need them
        before, done = torch.Event(device), torch.Event(device)
        before.record()
        for event in (before, *copied):
            self._stream.wait_event(event)
        with self._stream:
            weighed = self._weigh(group, begun, expected)
            done.record()
        self._last = done
        return _Early(weighed=weighed, done=done)

    def _weigh(self, group: Group, begun: _Begun, expected: _Expected) -> WeighedLoad:
        """As few launches as can be: they wait for nothing, but each takes 10 us or more to put together.

        Where nobody knows what slots are to hold, nothing in them was replaced by another token: they are
        compared with what was sent alone, and get no record here.
        """
        identities = begun.identities
        now = hash_slots(group.backend, group.plan, begun.slots.flatten())
        loaded = ArrivedLoad(
            slots=begun.slots,
            old=begun.old,
            identities=begun.old[:, :, : layout.FINGERPRINT_K].contiguous()
            if identities is None
            else identities,
            now=now.view(*begun.slots.shape, 2),
            edges=expected.edges,
            keys=self._keys.of(begun.slots.shape[1], now.device),
            held=self._held[group.index],
        )
        keeps = identities is not None
        return WeighedLoad(group.backend, group.buffers, loaded, expected.sent, keeps=keeps)


def _expected(arrived: ArrivedBlocks, device: torch.device) -> _Expected:
    edges = torch.stack((arrived.first, arrived.stop, arrived.copies, arrived.filled), 1)
    compared = torch.where(arrived.copies > 0, arrived.filled, (arrived.stop - arrived.first).clamp(min=0))
    return _Expected(
        arrived=arrived,
        edges=uploaded(edges, device),
        sent=uploaded(arrived.sent, device),
        compared=int(compared.sum()),
    )


def _records_of(group: Group, known: Tensor, slots: Tensor) -> Tensor:
    """int64 [n, RECORD_WORDS]; known: the same slots on the CPU, where it is seen that all of them exist."""
    numbers = known.numpy()
    if numbers.size and numbers.min() >= 0 and numbers.max() < group.view.num_slots:
        return group.memory.index_select(0, slots)
    return group.records_of(slots)


def _identities(blocks: LoadedBlocks) -> Tensor | None:
    """int64 [blocks, size, 2], on the CPU: IDENTITY, COMPLETE, and CHAIN of what the blocks are to hold."""
    if blocks.tokens is None or blocks.positions is None or blocks.chains is None:
        return None
    token = blocks.tokens.numpy() & layout.TOKEN_MASK
    state = blocks.positions.numpy() << layout.STATE_BITS | int(layout.RecordState.COMPLETE)
    chain = blocks.chains.numpy()
    identity = sealed_arrays((token | state << 32).ravel(), chain.ravel())
    return torch.stack((torch.from_numpy(identity).view(blocks.tokens.shape), blocks.chains), -1)


def _parts_held(group: Group) -> Tensor:
    held = {int(source.part) for source in group.view.sources}
    codes = [int(part in held) for part in (layout.Part.K, layout.Part.V)]
    return torch.tensor(codes, dtype=torch.int64, device=group.memory.device)
