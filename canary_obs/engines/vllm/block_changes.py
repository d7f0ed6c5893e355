"""What a scheduler's output says happened to the bytes of blocks, told to the canary."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from canary_obs.engine_api.observer import Observer
from canary_obs.engines.vllm.cached_blocks import BlockEvent, Loaded
from canary_obs.engines.vllm.groups import FoundGroup
from canary_obs.engines.vllm.window_tables import NULL_BLOCK


class BlockChanges:
    """Blocks zeroed, copied, loaded, or handed from one group to another."""

    def __init__(self, found: Sequence[FoundGroup], device: torch.device) -> None:
        self._found, self._device = found, device

    def tell(self, output: Any, events: Iterable[BlockEvent] | None, observer: Observer) -> None:
        """Before the runner acts on a scheduler output, which came with these events."""
        zeroed = output.new_block_ids_to_zero
        copies = output.kv_cache_block_copies
        taken = self._taken(output) if len(self._found) > 1 else {}
        loads = [event for event in events or () if isinstance(event, Loaded)]
        if not (zeroed or copies or taken or loads):
            return
        for group in self._found:
            name = group.view.name
            # Groups overlay the same bytes: a block handed to one group ends its records in the others.
            lost = set(chain(zeroed or (), *(ids for other, ids in taken.items() if other != group.number)))
            lost.discard(NULL_BLOCK)
            if lost:
                observer.invalidated(name, self._slots(sorted(lost), group))
            if loaded := [event for event in loads if event.group == group.number]:
                observer.received(name, _loaded_slots(loaded, group.block_size).to(self._device))
            if copies:
                source, destination = zip(*copies, strict=True)
                observer.copied(name, self._slots(source, group), self._slots(destination, group))

    def _taken(self, output: Any) -> dict[int, set[int]]:
        """Blocks that this output hands to requests, by vLLM's group number."""
        cached = output.scheduled_cached_reqs
        handed = [request.block_ids for request in output.scheduled_new_reqs]
        handed += [blocks for blocks in cached.new_block_ids if blocks is not None]
        return {
            group.number: set(chain.from_iterable(blocks[group.number] for blocks in handed))
            for group in self._found
        }

    def _slots(self, blocks: Sequence[int], group: FoundGroup) -> Tensor:
        return slots_of(blocks, group.block_size).to(self._device, non_blocking=True)


def slots_of(blocks: Sequence[int], block_size: int) -> Tensor:
    """int64 [len(blocks) * block_size]: all slots of some blocks, on the CPU."""
    starts = torch.tensor(blocks, dtype=torch.int64) * block_size
    return (starts[:, None] + torch.arange(block_size)).flatten()


def _loaded_slots(events: Sequence[Loaded], block_size: int) -> Tensor:
    """int64 [n]: the slots that loads fill."""
    runs = [torch.arange(event.first, event.stop) + event.block * block_size for event in events]
    return torch.cat(runs)
