"""Groups of states (Mamba, linear attention, short convolutions): one slot per block, rewritten in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any, Generic, NamedTuple, TypeVar
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from canary_kernels.forward_start import RING_ROWS
from canary_kernels.hashing import mix_arrays
from canary_obs.engine_api.observer import Observer
from canary_obs.engine_api.views import GroupStep, StepTypes
from canary_obs.engines.toolkit.chain_sums import ANCHOR
from canary_obs.engines.toolkit.state_entries import StateEntries
from canary_obs.engines.vllm.groups import VllmGroup
from canary_obs.engines.vllm.window_tables import NULL_BLOCK

_Slots = TypeVar("_Slots")  # a list of numbers, or a tensor of them

_UNKNOWN = -1  # slot: no record is written, and none is looked for


class StateSteps:
    """What a forward does to states, as a view's GroupSteps: see StateEntries.

    A request keeps one state, in the block of its last token. A record is written where the scheduler says
    that it is, and looked for where the block table leads the model's layers: two answers are a finding. It
    holds a number of the request in place of a token. Memory is allocated once.
    """

    def __init__(
        self, groups: Sequence[VllmGroup], blocks: StateBlocks, types: StepTypes, shape: tuple[int, Any]
    ) -> None:
        """`shape`: most requests of a batch, and the device."""
        max_requests, device = shape

        def column(dtype: torch.dtype) -> Tensor:
            return torch.zeros(max_requests, dtype=dtype, device=device)

        self._groups, self._blocks = groups, blocks
        self._entries = StateEntries(max_requests, types, device)
        self._ends, self._columns = column(torch.int64), column(torch.int64)
        self._tables = {group.number: column(types.slot_table)[:, None] for group in groups}
        self._slots = {group.number: column(types.out_slots) for group in groups}
        self._ids = column(types.input_ids)
        self._shown: dict[int, dict[str, GroupStep]] = {}  # by number of requests
        # As they were given last, a row each: the number of each request, the digest of that, how many of the
        # two are known, and its slot in each group.
        given, pinned = (3 + len(groups), max_requests), torch.device(device).type == "cuda"
        self._given = torch.zeros(given, dtype=torch.int64, device=device)
        self._staging = cycle(
            [torch.zeros(given, dtype=torch.int64, pin_memory=pinned) for _ in range(RING_ROWS)]
        )
        self._requests: list[str] = []  # that they are of
        self._changes = -1  # and after how many changes of blocks

    def steps(
        self,
        requests: list[str],
        tables: Mapping[int, Tensor],
        prefix_lens: Tensor,
        extend_lens: Tensor,
    ) -> dict[str, GroupStep]:
        """By group name. tables: block tables by vLLM's group number, rows in the order of the batch.

        prefix_lens and extend_lens: [num_requests]. The next call overwrites what this one returned.
        """
        count = len(requests)
        for group in self._groups:
            table, own = tables[group.number], self._tables[group.number][:count]
            columns = self._columns[:count]
            if group.state_tokens is None:  # one block for the whole request
                columns.zero_()
            else:
                ends = torch.add(prefix_lens, extend_lens, out=self._ends[:count]).sub_(1)
                torch.div(ends, group.state_tokens, rounding_mode="floor", out=columns)
            torch.gather(table[:count], 1, columns[:, None], out=own)
        if self._changes != self._blocks.changes or self._requests != requests:
            self._give(requests)
        if count not in self._shown:
            self._shown[count] = self._steps_of(count)
        return self._shown[count]

    def _give(self, requests: list[str]) -> None:
        """Put what the scheduler says of these requests on the device: a copy that waits for nothing."""
        self._requests, self._changes = requests, self._blocks.changes
        staging, count = next(self._staging), len(requests)
        rows = staging.numpy()
        numbers = np.array([crc32(name.encode()) >> 1 for name in requests], dtype=np.int32)
        rows[0, :count] = numbers
        rows[1, :count] = (mix_arrays(numbers, np.zeros(count, dtype=np.int64)) + ANCHOR).view(np.int64)
        for row, group in zip(rows[3:], self._groups, strict=True):
            slots = self._blocks.slots[group.number]
            row[:count] = [slots.get(name, _UNKNOWN) for name in requests]
        rows[2, :count] = np.where((rows[3:, :count] == _UNKNOWN).any(0), -1, 1)
        self._given.copy_(staging, non_blocking=True)
        self._ids.copy_(self._given[0])
        for given, group in zip(self._given[3:], self._groups, strict=True):
            self._slots[group.number].copy_(given)

    def _steps_of(self, count: int) -> dict[str, GroupStep]:
        tokens = replace(
            self._entries.of(count),
            input_ids=self._ids[:count],
            known_lens=self._given[2, :count],
            known_digests=self._given[1, :count],
        )
        return {
            group.view.name: GroupStep(
                slot_table=self._tables[group.number],
                out_slots=self._slots[group.number][:count],
                tokens=tokens,
            )
            for group in self._groups
        }


class StateChanges(NamedTuple, Generic[_Slots]):
    """Slots of one group."""

    sources: _Slots  # copied by the worker before its forward
    destinations: _Slots
    checkpoints: _Slots  # of `left`: apart from the states that requests go on with
    rested: _Slots  # without a record, of requests that the forward leaves alone
    rewritten: _Slots  # by the forward, which is not shown with states: they have a record until then
    left: _Slots  # by the forward, so that others may read them: they need a record
    passed: _Slots  # copied to, and rewritten by the forward: they have no record after it


class StateBlocks:
    """Follows scheduler outputs: where requests' states are, which are copied or written besides those.

    The worker copies the state of a request whose next token lies in another block than its last one, also
    where that one comes from the prefix cache; the scheduler does not list these copies. A prefill that
    reaches over several blocks leaves a state for the prefix cache in the block before its last.

    One of `Observer.state_interval` forwards is shown with states. In the others a state has no record from
    when the first of them rewrites it, unless it is one that others may read, or that rests: at the end of a
    block, or of a prompt's chunk.
    """

    def __init__(self, groups: Sequence[VllmGroup]) -> None:
        self.groups = groups
        self._blocks: dict[str, tuple[list[int], ...]] = {}  # by request; lists by vLLM's group number
        self._ends: dict[str, int] = {}  # by request: tokens in its state
        # By vLLM's group number and request: the slot of the state that its last forward leaves.
        self.slots: dict[int, dict[str, int]] = {group.number: {} for group in groups}
        self.changes = 0  # of `slots`
        self.shown = True  # whether the forward under way is
        self.left_out = 0  # forwards so far
        self._observer: Observer | None = None  # of the last output that was followed
        self._adoptions = 0  # by it, before the last forward
        self._until_shown = 0  # forwards
        self._unchanging = 0  # forwards that decode the same requests, and in which nothing is to be done
        self._running: list[str] = []  # these requests
        self._counted_from: int | None = None
        self._scheduled_last: Any = None  # the output whose blocks were noted last
        # By group, as `slots`: of requests whose state has had no record since a forward that was not shown.
        self._open: dict[int, dict[str, int]] = {group.number: {} for group in groups}

    def may_leave_out(self, counted: int) -> int:
        """Forwards that were left out, up to the most that may be of those that were counted elsewhere."""
        if self._counted_from is None:
            self._counted_from, self.left_out, self._until_shown, self._unchanging = counted, 0, 0, 0
        every = 1 if self._observer is None else self._observer.state_interval
        return min(self.left_out, (counted - self._counted_from) * (every - 1) // every)

    def go_on(self, output: Any) -> bool:
        """Whether an output that gives nobody a block needs not be followed. Its forward is left out then."""
        requests = output.scheduled_cached_reqs.req_ids
        if (
            not self._unchanging
            or output.total_num_scheduled_tokens != len(requests)
            or requests != self._running
            or self._observer is None
            or self._observer.adoptions != self._adoptions
        ):
            return False
        self._unchanging -= 1
        self._until_shown -= 1
        self.left_out += 1
        self.shown = False
        return True

    def miss(self, output: Any) -> None:
        """An output failed to be followed: where its requests' states are is noted, and nothing announced."""
        if not self.groups or self._scheduled_last is output:
            return
        for request, count in self._scheduled(output).items():
            self._ends[request] = count + output.num_scheduled_tokens[request]
        for open_states in self._open.values():
            open_states.clear()
        self._until_shown = self._unchanging = 0
        self.shown = False
        self.left_out += bool(output.total_num_scheduled_tokens)

    def follow(self, output: Any, observer: Observer) -> dict[str, StateChanges[list[int]]]:
        """By group name: what an output brings. A group without changes is left out."""
        scheduled = self._scheduled(output) if self.groups else {}
        if not scheduled:
            self.shown = True
            return {}
        self._observer, adoptions = observer, observer.adoptions
        # Else what is not shown would have got a baseline, and change.
        self.shown = not self._until_shown or adoptions != self._adoptions
        self._adoptions = adoptions
        self._until_shown = (observer.state_interval if self.shown else self._until_shown) - 1
        found: dict[str, StateChanges[list[int]]] = {
            group.view.name: StateChanges([], [], [], [], [], [], []) for group in self.groups
        }
        for group in self.groups:
            open_states, changes = self._open[group.number], found[group.view.name]
            for request in open_states.keys() - scheduled.keys():
                changes.rested.append(open_states.pop(request))
            if self.shown:
                open_states.clear()
        for request, count in scheduled.items():
            before, tokens = self._ends.get(request, count), output.num_scheduled_tokens[request]
            self._ends[request] = end = count + tokens
            for group in self.groups:
                self._follow_one(group, request, (before, end, tokens), found[group.view.name])
        self._running = list(output.scheduled_cached_reqs.req_ids)
        self._unchanging = 0 if self.shown else self._steps_without_changes(output)
        return {name: changes for name, changes in found.items() if any(changes)}

    def _steps_without_changes(self, output: Any) -> int:
        """After this one, if they decode the same requests and nobody is given a block."""
        if any(len(slots) < len(output.num_scheduled_tokens) for slots in self._open.values()):
            return 0
        sizes = [group.state_tokens for group in self.groups if group.state_tokens is not None]
        ends = [self._ends[request] for request in output.num_scheduled_tokens]
        return min([self._until_shown, *(size - end % size - 1 for size in set(sizes) for end in ends)])

    def _follow_one(
        self, group: VllmGroup, request: str, lengths: tuple[int, int, int], changes: StateChanges[list[int]]
    ) -> None:
        """`lengths`: tokens in the state before the forward and after it, and those that it computes."""
        (before, end, tokens), size = lengths, group.state_tokens
        blocks, slots = self._blocks[request][group.number], self.slots[group.number]
        destination = 0 if size is None else (end - 1) // size
        slot = blocks[destination] if destination < len(blocks) else _UNKNOWN
        if slots.get(request) != slot:
            slots[request] = slot
            self.changes += 1
        moves = size is not None and before and (before - 1) // size != destination
        if size is not None:
            source = (before - 1) // size
            if moves:
                changes.sources.append(blocks[source])
                changes.destinations.append(slot)
            if destination - 1 > source and blocks[destination - 1] != NULL_BLOCK:
                changes.checkpoints.append(blocks[destination - 1])
                changes.left.append(blocks[destination - 1])
        if self.shown:
            return
        open_states = self._open[group.number]
        # A copy is compared when the forward begins, by the record that it still has then.
        if not moves and open_states.get(request) != slot:
            changes.rewritten.append(slot)
        if tokens > 1 or (size is not None and not end % size):
            changes.left.append(slot)
            open_states.pop(request, None)
            return
        if moves:
            changes.passed.append(slot)
        open_states[request] = slot

    def _scheduled(self, output: Any) -> dict[str, int]:
        """Tokens computed before, by request of this output, whose blocks are known from here on."""
        self._scheduled_last = output
        cached = output.scheduled_cached_reqs
        for request in {*output.finished_req_ids, *(output.preempted_req_ids or ()), *cached.resumed_req_ids}:
            self._blocks.pop(request, None)
            self._ends.pop(request, None)
            for slots in (*self.slots.values(), *self._open.values()):
                slots.pop(request, None)
        found: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            found[new.req_id] = int(new.num_computed_tokens)
            self._ends.pop(new.req_id, None)
            self._blocks[new.req_id] = tuple(list(ids) for ids in new.block_ids)
        columns = zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True)
        for request, count, added in columns:
            found[request] = int(count)
            lists = self._blocks.setdefault(request, tuple([] for _ in added or ()))
            for known, ids in zip(lists, added or (), strict=False):
                known.extend(ids)
        return found
