"""Compares slots beside the engine's own stream. A difference there is a suspicion, not yet a finding.

A slot may be rewritten while a scout reads it. So a scout counts into memory of its own, and whoever sent
it repeats a suspected comparison on the engine's stream, in order with every writer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from canary_kernels import layout
from canary_kernels.buffers import GroupBuffers
from canary_kernels.fingerprint import compare_range
from canary_obs.pipeline.delayed_device_host import DelayedDeviceHost
from canary_obs.runtime.state import DeviceState, Group

_IN_FLIGHT = 4
_RUNS = layout.COUNT_RUNS + layout.Phase.PATROL


@dataclass(frozen=True, slots=True, kw_only=True)
class Errand:
    """Slots of a group, to be compared."""

    group: Group
    slots: range
    first_chunk: int
    last_chunk: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Return:
    """An errand that came back."""

    errand: Errand
    ran: bool  # False = the kernel left no trace
    suspicious: bool


class Scout:
    """Sends comparisons on a stream of its own, at most a few at a time; never waits for the device."""

    def __init__(self, state: DeviceState) -> None:
        device, count = state.clock.device, len(state.groups)
        self._backend = state.backend
        counters = torch.zeros((count, layout.COUNTER_WORDS), dtype=torch.int64, device=device)
        log = torch.zeros((layout.NUM_LANES, 2, layout.ROW_WORDS), dtype=torch.int64, device=device)
        clock = torch.ones(1, dtype=torch.int64, device=device)
        self._buffers = [
            GroupBuffers(
                records=group.buffers.records, counters=counters[group.index], violations=log, clock=clock
            )
            for group in state.groups
        ]
        # The lowest priority there is; it is also the default one of an engine's own streams.
        on_cuda = device.type == "cuda"
        self._beside: AbstractContextManager[object] = (
            torch.Stream(device, priority=0) if on_cuda else nullcontext()
        )
        self._host = DelayedDeviceHost(counters.view(-1), _IN_FLIGHT, side_stream=False)
        self._errands: deque[Errand] = deque()
        self.busy = False  # an errand is under way, and its way back is not yet arranged
        self._seen = [0] * counters.numel()  # counters, group after group

    @property
    def full(self) -> bool:
        """Whether as many errands are under way as there may be."""
        return self._host.full

    @property
    def counted(self) -> list[list[int]]:
        """[groups][COUNTER_WORDS]: slots hashed and skipped so far; no violations."""
        seen, lanes, width = self._seen, layout.NUM_LANES, layout.COUNTER_WORDS
        return [[0] * lanes + seen[start + lanes : start + width] for start in range(0, len(seen), width)]

    def send(self, errand: Errand) -> None:
        """Start an errand's comparison. Only when not full and not busy; then `report`."""
        group = errand.group
        buffers = self._buffers[group.index]
        with self._beside:
            compare_range(self._backend, buffers, group.plan, errand.slots, layout.Phase.PATROL)
        self._errands.append(errand)
        self.busy = True

    def report(self, now: float) -> None:
        """Start the copy of what the errand counts. Only when busy.

        Apart from `send`, as each has the host make a launch: a step of the engine has time for one.
        """
        with self._beside:
            self._host.push(0, now)
        self.busy = False

    def returned(self, timeout: float = 0.0) -> Iterator[Return]:
        """Errands that came back, oldest first; waits up to `timeout` seconds for all of them."""
        for sample in self._host.flush(timeout) if timeout else self._host.poll():
            errand = self._errands.popleft()
            first = errand.group.index * layout.COUNTER_WORDS
            lanes, run = slice(first, first + layout.NUM_LANES), first + _RUNS
            # Lists: every NumPy call on rows this short takes longer than all of this.
            before, self._seen = self._seen, sample.words.tolist()
            ran = self._seen[run] == before[run] + 1
            yield Return(errand=errand, ran=ran, suspicious=self._seen[lanes] != before[lanes])
