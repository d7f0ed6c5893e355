"""What a vLLM adapter answers for its requests: who runs, who holds blocks, what was shown of them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from canary_obs.engine_api.adapter import EngineAdapter
from canary_obs.engine_api.observer import Observer
from canary_obs.engine_api.requests import BlockTable, StoredIn
from canary_obs.engines.toolkit.block_slots import slots_of
from canary_obs.engines.vllm.block_changes import BlockChanges
from canary_obs.engines.vllm.cached_blocks import CachedBlocks
from canary_obs.engines.vllm.connector_reports import ConnectorReports
from canary_obs.engines.vllm.forward_count import ForwardCount
from canary_obs.engines.vllm.groups import VllmGroup
from canary_obs.engines.vllm.pending_events import EVENTS_ATTRIBUTE
from canary_obs.engines.vllm.request_changes import RequestChanges
from canary_obs.engines.vllm.states import StateBlocks
from canary_obs.engines.vllm.window_tables import NULL_BLOCK
from canary_obs.errors import KVCacheViolation


class FollowsRequests(EngineAdapter):
    """An adapter whose RequestChanges answer for it."""

    requests: RequestChanges
    connector: ConnectorReports
    states: StateBlocks
    inputs_persist: bool
    cached_blocks: CachedBlocks
    _by_name: dict[str, VllmGroup]
    _block_changes: BlockChanges
    _forwards: ForwardCount
    completes_views = True  # by `complete_view`
    _followed = -1  # the scheduler's number of the last output; -1 = none so far

    def follow_output(self, output: Any, observer: Observer) -> None:
        """Follow the requests and blocks of a scheduler output, before the runner acts on it."""
        number = self._forwards.number
        if number > self._followed + 1 > 0:
            self._block_changes.owners.forget()
        self._followed = number
        try:  # not by `guarded`: every step pays for each call
            self._follow(output, observer)
        except KVCacheViolation:
            raise
        except Exception as error:  # noqa: BLE001 - a fault of the canary must not reach the engine
            try:
                self._block_changes.assign(output, output.__dict__.get(EVENTS_ATTRIBUTE))
            except Exception:  # noqa: BLE001 - this output is the cause
                self._block_changes.owners.forget()
            observer.fault("announce", error)
        self._followed = self._forwards.number  # of one that came past the worker, known by now

    @abstractmethod
    def _follow(self, output: Any, observer: Observer) -> None:
        """The same; may fail."""

    @abstractmethod
    def request_blocks(self, number: int) -> Iterator[tuple[str, Sequence[int]]]:
        """Running requests with their block lists in the KV cache group of this number."""

    def _blocks_of_requests(self, group: str) -> set[int]:
        if group not in self._by_name:
            return set()
        held = (blocks for _, blocks in self.request_blocks(self._by_name[group].number))
        return set(chain.from_iterable(held)) - {NULL_BLOCK}

    def slots_in_use(self, group: str) -> Tensor:
        """int64 [n] on the CPU: slots of running requests and of the prefix cache."""
        if group not in self._by_name:
            return torch.zeros(1, dtype=torch.int64)  # the scales
        used = self._blocks_of_requests(group).union(self.cached_blocks.live_blocks(group).tolist())
        return slots_of(sorted(used), self._by_name[group].block_slots)

    def foreign_slots(self, group: str) -> Tensor | None:
        """By the scheduler's outputs, if none was missed: it gives each block to one group at a time."""
        if (found := self._by_name.get(group)) is None or self._followed != self._forwards.number:
            return None
        return slots_of(self._block_changes.owners.foreign(found.number), found.block_slots)

    def show_requests(self) -> None:
        """What the steps so far have changed, and the one under way."""
        self.requests.settle()

    def _show_changes(self, output: Any, loaded_from: Mapping[str, int], observer: Observer) -> None:
        """Once the forward was launched, or something that precedes it asks to `show_requests`."""
        if output.total_num_scheduled_tokens and self.inputs_persist:
            self.requests.defer(output, loaded_from, observer)
        else:
            self.requests.report(output, loaded_from, observer)

    def copies_stored_in(self) -> StoredIn | None:
        """Connectors of this worker that store blocks, also of a MultiConnector."""
        return self.connector.stored_in

    def block_tables(self) -> Mapping[str, BlockTable]:
        """Block lists by vLLM's group number; a draft's layers share those of the target's group."""
        return self.requests.tables

    def forwards(self) -> dict[str, int]:
        """Scheduler outputs with tokens; drafting follows every forward of the target.

        Of states those are left out that are not shown, as far as may be.
        """
        counts = self._forwards.by_group
        if not self.states.groups:
            return counts
        names = (group.view.name for group in self.states.groups)
        return counts | {name: counts[name] - self.states.may_leave_out(counts[name]) for name in names}

    def requests_scheduled(self) -> int:
        """By the scheduler outputs that reached the worker."""
        return self._forwards.requests

    def tokens_emitted(self, request: str) -> int | None:
        """By the last scheduler output, where it was in it: with drafted tokens, the fewest there can be."""
        return self.requests.emitted(request)
