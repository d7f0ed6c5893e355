"""Groups of states (Mamba, linear attention, short convolutions): one slot per block, rewritten in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from canary_obs.engine_api.views import GroupStep, StepTypes
from canary_obs.engines.toolkit.state_entries import StateEntries
from canary_obs.engines.vllm.groups import VllmGroup
from canary_obs.engines.vllm.window_tables import NULL_BLOCK


class StateSteps:
    """What a forward does to states, as a view's GroupSteps: see StateEntries.

    A request keeps one state, in the block of its last token. Memory is allocated once.
    """

    def __init__(self, groups: Sequence[VllmGroup], max_requests: int, types: StepTypes, device: Any) -> None:
        def column(dtype: torch.dtype) -> Tensor:
            return torch.zeros(max_requests, dtype=dtype, device=device)

        self._groups, self._entries = groups, StateEntries(max_requests, types, device)
        self._ends, self._columns = column(torch.int64), column(torch.int64)
        self._tables = {group.number: column(types.slot_table)[:, None] for group in groups}
        self._slots = {group.number: column(types.out_slots) for group in groups}
        self._shown: dict[int, dict[str, GroupStep]] = {}  # by number of requests

    def steps(
        self, tables: Mapping[int, Tensor], prefix_lens: Tensor, extend_lens: Tensor
    ) -> dict[str, GroupStep]:
        """By group name. tables: block tables by vLLM's group number, rows in the order of the batch.

        prefix_lens and extend_lens: [num_requests]. The next call overwrites what this one returned.
        """
        count = prefix_lens.shape[0]
        for group in self._groups:
            table, own = tables[group.number], self._tables[group.number][:count]
            columns = self._columns[:count]
            if group.state_tokens is None:  # one block for the whole request
                columns.zero_()
            else:
                ends = torch.add(prefix_lens, extend_lens, out=self._ends[:count]).sub_(1)
                torch.div(ends, group.state_tokens, rounding_mode="floor", out=columns)
            torch.gather(table[:count], 1, columns[:, None], out=own)
            self._slots[group.number][:count].copy_(own[:, 0])
        if count not in self._shown:
            self._shown[count] = {group.view.name: self._step(group, count) for group in self._groups}
        return self._shown[count]

    def _step(self, group: VllmGroup, count: int) -> GroupStep:
        slots = self._slots[group.number][:count]
        return GroupStep(
            slot_table=self._tables[group.number], out_slots=slots, tokens=self._entries.of(count)
        )


class StateChanges(NamedTuple):
    """Slots of one group."""

    sources: list[int]  # copied by the worker before its forward
    destinations: list[int]
    checkpoints: list[int]  # written by the forward, apart from the states that requests go on with


class StateBlocks:
    """Follows scheduler outputs: which states are copied or written besides those that requests go on with.

    The worker copies the state of a request whose next token lies in another block than its last one, also
    where that one comes from the prefix cache; the scheduler does not list these copies. A prefill that
    reaches over several blocks leaves a state for the prefix cache in the block before its last.
    """

    def __init__(self, groups: Sequence[VllmGroup]) -> None:
        self._groups = [group for group in groups if group.state_tokens is not None]
        self._blocks: dict[str, tuple[list[int], ...]] = {}  # by request; lists by vLLM's group number
        self._ends: dict[str, int] = {}  # by request: tokens in its state

    def follow(self, output: Any) -> dict[str, StateChanges]:
        """By group name: what an output brings. A group without changes is left out."""
        if not self._groups:
            return {}
        found: dict[str, StateChanges] = {}
        for request, count in self._scheduled(output).items():
            before = self._ends.get(request, count)
            self._ends[request] = end = count + output.num_scheduled_tokens[request]
            for group in self._groups:
                size, blocks = group.state_tokens, self._blocks[request][group.number]
                assert size is not None
                source, destination = (before - 1) // size, (end - 1) // size
                changes = found.get(group.view.name) or StateChanges([], [], [])
                if before and source != destination:
                    changes.sources.append(blocks[source])
                    changes.destinations.append(blocks[destination])
                if destination - 1 > source and blocks[destination - 1] != NULL_BLOCK:
                    changes.checkpoints.append(blocks[destination - 1])
                if changes.sources or changes.checkpoints:
                    found[group.view.name] = changes
        return found

    def _scheduled(self, output: Any) -> dict[str, int]:
        """Tokens computed before, by request of this output, whose blocks are known from here on."""
        cached = output.scheduled_cached_reqs
        for request in {*output.finished_req_ids, *(output.preempted_req_ids or ()), *cached.resumed_req_ids}:
            self._blocks.pop(request, None)
            self._ends.pop(request, None)
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
