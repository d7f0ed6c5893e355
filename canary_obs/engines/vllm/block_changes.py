"""Reports to the canary what a scheduler output changes in the bytes of blocks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from canary_obs.engine_api.observer import Observer
from canary_obs.engines.toolkit.block_slots import give_up, slots_of
from canary_obs.engines.vllm.block_owners import BlockOwners
from canary_obs.engines.vllm.connector_loads import ConnectorLoads
from canary_obs.engines.vllm.groups import VllmGroup
from canary_obs.engines.vllm.pool_events import BlockEvent, Loaded
from canary_obs.engines.vllm.prefix_hits import PrefixHits
from canary_obs.engines.vllm.states import StateBlocks, StateChanges
from canary_obs.runtime.device.uploads import uploaded, uploaded_lists


class BlockChanges:
    """Blocks zeroed, copied, loaded, joined to a request, or handed from one group to another."""

    def __init__(
        self, groups: Sequence[VllmGroup], device: torch.device, numbers: Collection[int], *,
        empty: bool = False,
    ) -> None:  # fmt: skip
        """`numbers`: of all of vLLM's groups, checked or not. `empty`: no block has KV."""
        self._groups, self._device, self._numbers = groups, device, numbers
        self.owners = BlockOwners(groups[0].num_blocks, numbers, empty=empty)
        self.loads = ConnectorLoads(groups, device)
        self.states = StateBlocks([group for group in groups if group.states])
        # Groups and slots of states that the step under way leaves, and whether they get a baseline.
        self.written: list[tuple[str, Tensor, bool]] = []
        self._announced = self.written  # the last ones, whose memory the side stream may still read
        self.hits = PrefixHits(groups)

    def report(self, output: Any, events: Iterable[BlockEvent] | None, observer: Observer) -> None:
        """Report the changes of a scheduler output and its events, before the runner acts on it."""
        self.hits.note(output)
        self.loads.begin_step(output, events, observer)
        self._report_changes(output, events, observer)
        self._report_states(output, observer)
        self.hits.report(output, self.loads.loaded_from, observer)

    def grow(self, output: Any, observer: Observer) -> None:
        """An output gives blocks to requests that go on, and nothing else."""
        if len(self._numbers) > 1:
            self._report_changes(output, (), observer)

    def assign(self, output: Any, events: Iterable[BlockEvent] | None) -> None:
        """Note who gets blocks in an output that failed to be followed, and nothing else."""
        self.states.miss(output)
        self.owners.give(self._assigned(output, events or ()), ())

    def end_step(self, observer: Observer) -> None:
        """After the forward, on a stream that waits for it: what it brought is there."""
        self.loads.end_step(observer)
        self._announced, self.written = self.written, []
        for name, slots, lasting in self._announced:
            if lasting:
                observer.received(name, slots)
            else:
                observer.awaited(name, slots)

    def _report_states(self, output: Any, observer: Observer) -> None:
        unknown, self.written = self.written, []
        for name, slots, _ in unknown:  # of a step that failed: nobody knows what it has left
            observer.awaited(name, slots)
        found = self.states.follow(output, observer)
        lists = [*chain.from_iterable(found.values())]
        parts = iter(uploaded_lists(lists, self._device) if lists else ())
        for name, listed in found.items():
            changes: StateChanges[Tensor] = StateChanges._make(islice(parts, len(listed)))
            if listed.rested:
                observer.received(name, changes.rested)
            if listed.sources:
                observer.copied(name, changes.sources, changes.destinations)
            if listed.rewritten:
                observer.before_load(name, changes.rewritten)
                observer.awaited(name, changes.rewritten)
            if listed.checkpoints:
                observer.awaited(name, changes.checkpoints)
            if listed.left:
                self.written.append((name, changes.left, True))
            if listed.passed:
                self.written.append((name, changes.passed, False))
        if not self.states.shown:  # it counts until then: one before it that nobody saw is so noticed
            self.states.left_out += 1

    def _report_changes(self, output: Any, events: Iterable[BlockEvent] | None, observer: Observer) -> None:
        zeroed = output.new_block_ids_to_zero
        copies = output.kv_cache_block_copies
        assigned = self._assigned(output, events or ())
        if not (zeroed or copies or assigned):
            return
        # Groups share the same bytes: a block assigned to one group has lost its content in the others.
        lost = self.owners.give(assigned, zeroed or ())
        for group in self._groups:
            name = group.view.name
            if ended := lost.get(group.number):
                give_up(observer, name, self._slots(sorted(ended), group))
            if copies and not group.states:  # those are copied by the worker itself
                source, destination = (self._slots(blocks, group) for blocks in zip(*copies, strict=True))
                observer.before_load(name, destination)
                observer.copied(name, source, destination)

    def _assigned(self, output: Any, events: Iterable[BlockEvent]) -> dict[int, set[int]]:
        """Blocks that this output assigns to requests, or has a connector fill, by vLLM's group number.

        Nothing where there is one group alone, which shares no bytes.
        """
        if len(self._numbers) == 1:
            return {}
        cached = output.scheduled_cached_reqs
        assigned = [request.block_ids for request in output.scheduled_new_reqs]
        assigned += [blocks for blocks in cached.new_block_ids if blocks is not None]
        found = {
            number: set(chain.from_iterable(blocks[number] for blocks in assigned))
            for number in self._numbers
        }
        for event in events:
            if isinstance(event, Loaded):
                found[event.group].update(event.blocks)
        return found

    def _slots(self, blocks: Sequence[int], group: VllmGroup) -> Tensor:
        return uploaded(slots_of(blocks, group.block_slots), self._device)
