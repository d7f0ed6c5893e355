"""Blocks that a KV connector fills: awaited until their bytes have arrived, then given a baseline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from canary_obs.engine_api.observer import Observer
from canary_obs.engines.vllm.cached_blocks import BlockEvent, Loaded
from canary_obs.engines.vllm.groups import VllmGroup


class ConnectorLoads:
    """Follows loads from their announcement to their arrival, by scheduler outputs alone.

    A request that is scheduled along with its load is loaded by the forward itself, layer by layer: its bytes
    are there when that step has ended. Else the request waits, and it is scheduled when they are.
    Connectors write whole blocks, also where the match ends inside one, so whole blocks are awaited.
    """

    def __init__(self, groups: Sequence[VllmGroup], device: torch.device) -> None:
        self._groups, self._device = groups, device
        self._waiting: dict[str, list[Loaded]] = {}  # by request
        self._landing: list[tuple[str, Tensor]] = []  # group and slots that the step under way loads
        self._sizes = {group.number: group.block_size for group in groups}
        # By request of the step under way: the first token that was loaded, not found in the prefix cache.
        self.loaded_from: dict[str, int] = {}

    def begin_step(self, output: Any, events: Iterable[BlockEvent] | None, observer: Observer) -> None:
        """Before the forward of a scheduler output."""
        self._landing = []  # of a step that failed: nobody knows what has arrived
        self.loaded_from = {}
        started = [event for event in events or () if isinstance(event, Loaded)]
        if not (started or self._waiting):
            return
        for request in output.finished_req_ids | (output.preempted_req_ids or set()):
            self._waiting.pop(request, None)
        computed = _computed_tokens(output)
        for request in self._waiting.keys() & computed.keys():
            loads = self._waiting.pop(request)
            self.loaded_from[request] = self._first_token(loads)
            for group, slots in self._slots(loads, computed[request]):
                observer.received(group, slots)
        for request, loads in _by_request(started).items():
            for group, slots in self._slots(loads, None):
                # Whatever another group kept in these blocks is overwritten as well.
                for other in self._groups:
                    if other.view.name != group:
                        observer.invalidated(other.view.name, slots)
                observer.awaited(group, slots)
            if request in computed:
                self.loaded_from[request] = self._first_token(loads)
                self._landing += self._slots(loads, computed[request])
            else:
                self._waiting[request] = loads

    def end_step(self, observer: Observer) -> None:
        """After the forward, on a stream that waits for it."""
        landing, self._landing = self._landing, []
        for group, slots in landing:
            observer.received(group, slots)

    def _first_token(self, loads: Sequence[Loaded]) -> int:
        return min(
            load.number * self._sizes[load.group] + load.first for load in loads if load.group in self._sizes
        )

    def _slots(self, loads: Sequence[Loaded], computed: int | None) -> list[tuple[str, Tensor]]:
        """By group: the slots of loaded tokens below `computed`, or None for all slots of their blocks.

        What is computed from there on is written by the forward, and needs no baseline.
        """
        found = []
        for group in self._groups:
            offsets = torch.arange(group.block_size)
            runs = []
            for load in loads:
                if load.group == group.number:
                    stop = group.block_size
                    if computed is not None:
                        stop = min(load.stop, computed - load.number * group.block_size)
                    first = 0 if computed is None else load.first
                    runs.append(offsets[first : max(first, stop)] + load.block * group.block_size)
            if runs:
                found.append((group.view.name, torch.cat(runs).to(self._device, non_blocking=True)))
        return found


def _computed_tokens(output: Any) -> dict[str, int]:
    """Tokens that are in the cache before this output's forward, by scheduled request."""
    found = {new.req_id: int(new.num_computed_tokens) for new in output.scheduled_new_reqs}
    cached = output.scheduled_cached_reqs
    found.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return found


def _by_request(loads: Iterable[Loaded]) -> dict[str, list[Loaded]]:
    found: dict[str, list[Loaded]] = {}
    for load in loads:
        found.setdefault(load.request, []).append(load)
    return found
