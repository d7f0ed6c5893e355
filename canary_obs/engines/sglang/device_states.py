"""What forwards do to states of linear attention and Mamba layers, on a GPU."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from canary_kernels.forward_start import RING_ROWS
from canary_obs.engine_api.observer import Observer
from canary_obs.engine_api.views import GroupStep, GroupTokens, StepTypes, StepView
from canary_obs.engines.sglang.check_order import CheckOrder
from canary_obs.engines.sglang.states import STATE, held_state, numbers_of
from canary_obs.engines.toolkit.state_entries import StateEntries
from canary_obs.runtime.device.uploads import uploaded

_KEPT = 8  # forwards whose tensors the checks may still read


class DeviceStates:
    """As `StateSteps`, in memory of its own, which stays as it is until the next forward.

    Where states of running requests are nobody else's, not every forward that decodes the same requests is
    shown with them: to read all twice in each took 7 % of a decode (docs/measurements.md).
    """

    def __init__(self, rows: Tensor, types: StepTypes) -> None:
        """`rows`: of the states, as layers are given them, int32 [rows of the request table]."""
        most, device = rows.shape[0], rows.device
        self._rows = rows
        self._table = torch.zeros((most, 1), dtype=rows.dtype, device=device)
        self._slots = torch.zeros(most, dtype=torch.int64, device=device)
        self._numbers = torch.zeros((2, most), dtype=torch.int64, device=device)
        self._ones = torch.ones(most, dtype=torch.int64, device=device)
        self._counting = torch.arange(most, device=device)
        self._entries = StateEntries(most, types, device)
        pinned = device.type == "cuda"
        staging = [torch.zeros((2, most), dtype=torch.int64, pin_memory=pinned) for _ in range(RING_ROWS)]
        self._staging = cycle([(buffer, buffer.numpy()) for buffer in staging])
        self._steps = {0: GroupStep(slot_table=self._table[:0], out_slots=self._slots[:0])}  # by requests
        self.last = self._steps[0]  # of the last forward
        self.names: Sequence[str] = ()  # of the last forward's requests
        self._held: Sequence[Tensor] = ()
        self.every = 1  # of so many forwards that decode the same requests, the first is shown with states
        self._since = 0  # forwards since that one
        self._decoded = False  # whether the last forward did
        self.leave: Callable[[Tensor], None] = _nothing  # its states change from now on, and are not shown
        self.left_out = 0  # forwards
        self._counted_from: int | None = None
        self.adoptions: Callable[[], int] = _none  # by the observer
        self._adoptions = 0  # before the last forward

    @property
    def shown(self) -> bool:
        """Whether the last forward was shown with its states."""
        return not self._since

    def may_leave_out(self, counted: int) -> int:
        """Forwards that were left out, up to the most that may be of those that the scheduler has counted."""
        if self._counted_from is None:
            self._counted_from = counted
        return min(self.left_out, (counted - self._counted_from) * (self.every - 1) // self.every)

    def take_left(self) -> Tensor | None:
        """int64 [n]: slots of states that have no record since the last forward, once; None = they have."""
        if not self._since:
            return None
        self._since, self._decoded = 0, False
        return self.last.out_slots

    def keep(self, rows: Tensor, requests: Sequence[Any], names: Sequence[str], *, decodes: bool) -> None:
        """A forward of these requests is next; on its stream.

        `rows`: in the request table, int64 [n]. `names`: the same list for the same requests. Raises
        LookupError for a request without a state.
        """
        count, same = len(names), names is self.names and decodes and self._decoded
        self._decoded = decodes
        adoptions = self.adoptions()
        if adoptions != self._adoptions:  # what is not shown gets a baseline, and changes
            self._adoptions, same = adoptions, False
        if names is not self.names:
            staging, values = next(self._staging)
            values[0, :count], values[1, :count] = numbers_of(names)
            self._numbers.copy_(staging, non_blocking=True)
            self.names = names
        held = [held_state(request) for request in requests]
        if len(held) != len(self._held) or not all(map(operator.is_, held, self._held)):
            there = [slot for slot in held if slot is not None]
            if len(there) < count:
                raise LookupError(f"SGLang runs {count - len(there)} of {count} requests without a state")
            torch.stack(there, out=self._slots[:count])
            self._held, same = there, False
        self._since = (self._since + 1) % self.every if same else 0
        if self._since:
            if self._since == 1:  # it counts until then: one before it that nobody saw is so noticed
                self.leave(self.last.out_slots)
            self.left_out += 1
            return
        torch.index_select(self._rows, 0, rows[:count], out=self._table[:count, 0])
        if count not in self._steps:
            tokens = self._tokens(count, *self._numbers[:, :count])
            self._steps[count] = GroupStep(
                slot_table=self._table[:count], out_slots=self._slots[:count], tokens=tokens
            )
        self.last = self._steps[count]

    def slots_of(self, which: Tensor) -> Tensor:
        """int64 [n]: the slots of some of the last forward's requests, by their places."""
        return self._slots[which]

    def view_of(self, places: Sequence[int], which: Tensor, slots: Tensor) -> StepView:
        """A forward of its own that writes the states of some of the last forward's requests to `slots`.

        `places` and `which`: of these requests, in the list and int64 [n] on the device.
        """
        count = len(places)
        tokens = self._tokens(count, *self._numbers[:, which])
        table = slots.to(self._table.dtype)[:, None]
        return StepView(
            request_ids=[self.names[place] for place in places],
            rows=self._counting[:count],
            prefix_lens=tokens.prefix_lens,
            extend_lens=tokens.extend_lens,
            token_starts=tokens.token_starts,
            input_ids=tokens.input_ids,
            positions=tokens.positions,
            digests=tokens.digests,
            groups={STATE: GroupStep(slot_table=table, out_slots=slots, tokens=tokens)},
            known_lens=tokens.known_lens,
            known_digests=tokens.known_digests,
        )

    def _tokens(self, count: int, numbers: Tensor, known: Tensor) -> GroupTokens:
        return replace(
            self._entries.of(count), input_ids=numbers, known_lens=self._ones[:count], known_digests=known
        )


class _Tracked(NamedTuple):
    """States that the forward under way leaves for the prefix cache."""

    places: Sequence[int]  # of their requests in the batch
    which: Tensor  # the same, int64 [n] on the device
    slots: Tensor  # int64 [n], where they are left
    copied: bool  # from the requests' own, as it ends


class TrackedStates:
    """States that forwards leave in buffers for the prefix cache (SGLang's `extra_buffer`).

    A decode copies those of requests that have reached a multiple of the interval. What has no record to be
    copied, and what a prompt leaves, that of its last whole chunk, is shown as a forward of its own.
    """

    def __init__(self, arguments: Any, states: DeviceStates) -> None:
        self._chunk = int(arguments.mamba_cache_chunk_size)
        self._interval = int(arguments.mamba_track_interval)
        self._states = states
        self.shown = 0  # forwards besides SGLang's
        self._kept = deque[_Tracked](maxlen=_KEPT)

    def begin(self, batch: Any, observer: Observer, checks: CheckOrder) -> _Tracked | None:
        """A forward is next, on the current stream: what its states are written over is compared."""
        if batch.mamba_track_mask is None:
            return None
        if copied := batch.forward_mode.is_decode():
            due = batch.seq_lens_cpu.numpy() % self._interval == 0
        else:
            due = np.array(batch.extend_seq_lens_cpu) >= self._chunk
        (places,) = np.nonzero(due)
        if not places.size:
            return None
        which = uploaded(torch.from_numpy(places), batch.mamba_track_indices.device)
        tracked = _Tracked(places.tolist(), which, batch.mamba_track_indices[which].to(torch.int64), copied)
        self._kept.append(tracked)
        with checks.in_order():
            observer.before_load(STATE, tracked.slots)
            observer.invalidated(STATE, tracked.slots)
        checks.precede()
        return tracked

    def end(self, tracked: _Tracked, observer: Observer, checks: CheckOrder) -> None:
        """The forward was launched, and its checks."""
        with checks.in_order():
            if tracked.copied and self._states.shown:
                observer.copied(STATE, self._states.slots_of(tracked.which), tracked.slots)
                return
            view = self._states.view_of(tracked.places, tracked.which, tracked.slots)
            self.shown += 1
            # Not `before_forward`, which ends replays: this view is complete, and its checks come at once.
            observer.before_write(view)
            observer.forward_launched(view)
            observer.after_forward(view)


def _none() -> int:
    """Nothing was adopted."""
    return 0


def _nothing(_: Tensor) -> None:
    """Every forward is shown."""
