"""Records that travel with SGLang's KV to host memory and to its storage, and back."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from canary_kernels import layout
from canary_obs.engine_api.observer import Observer
from canary_obs.engines.sglang.groups import DRAFT, FULL
from canary_obs.engines.sglang.settings import settings_of
from canary_obs.engines.toolkit.guarded import guarded
from canary_obs.engines.toolkit.method_patches import MethodPatches
from canary_obs.vocabulary import HOST_PEER

_STORED_PAGES = 65_536  # whose records are remembered; of the others a copy comes back without


class HostTier:
    """Follows one cache controller: each host slot of a known pool has a record, zeros = none.

    Transfers are submitted on the scheduler's thread; its threads read and write the storage, in host
    slots that nobody else uses meanwhile.
    """

    device_bytes = 0  # the host slots' records are on the host

    def __init__(self, controller: Any, pools: Mapping[str, Any], observer: Observer) -> None:
        """`pools`: the device pool that holds each group's KV."""
        self._controller, self._observer = controller, observer
        self._groups = {id(pool): name for name, pool in pools.items()}
        self.compared = 0  # slots that came back with a record
        self.without = 0  # that came back without
        self._records: dict[int, Tensor] = {}  # by the id of the device pool
        self._packed: dict[int, list[Any]] = {}  # by the same: pools whose bytes its host slots have as well
        self._stored: OrderedDict[str, list[Tensor]] = OrderedDict()  # by the key in the storage
        self._paged: list[Tensor] = []  # the records of the pools whose bytes a stored page has
        with torch.inference_mode(False):
            for entry in controller.mem_pool_host.entry_map.values():
                slots = int(entry.host_pool.logical_size)
                for pool in (entry.device_pool, *packed_drafts(entry)):
                    if id(pool) in self._groups:
                        self._records[id(pool)] = torch.zeros((slots, layout.RECORD_WORDS), dtype=torch.int64)

    def wrap(self, patches: MethodPatches) -> None:
        """Follow from now on; `patches` undoes that. What was copied before has no record."""
        controller = self._controller
        patches.wrap(controller.l2_transfer_engine, "submit_device_to_host", self._around_offload)
        patches.wrap(controller.l2_transfer_engine, "submit_host_to_device", self._around_load)
        for entry in controller.mem_pool_host.entry_map.values():
            name = self._groups.get(id(entry.device_pool))
            # A draft model's KV is in host slots of the target's numbers, and SGLang allocates only those.
            if name is None or name == DRAFT:
                continue
            emptied = [self._records[id(entry.device_pool)]]
            if name == FULL:
                drafts = (pool for pool, own in self._groups.items() if own == DRAFT)
                emptied += [self._records[pool] for pool in drafts if pool in self._records]
                packed = [pool for pool in packed_drafts(entry) if id(pool) in self._records]
                self._packed[id(entry.device_pool)] = packed
                self._paged = [emptied[0], *(self._records[id(pool)] for pool in packed)]
            patches.wrap(entry.host_pool, "alloc", self._around_alloc(emptied))
        # Instance attributes of the controller, which its threads read for each batch of pages.
        patches.wrap(controller, "page_set_func", self._around_page_set)
        patches.wrap(controller, "page_get_func", self._around_page_get)

    # Between the device and the host --------------------------------------------------------------------

    def _around_offload(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def submit_device_to_host(transfers: Sequence[Any]) -> Any:
            completion = original(transfers)
            guarded(self._observer, "host_tier", self._keep, transfers)
            return completion

        return submit_device_to_host

    def _around_load(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def submit_host_to_device(transfers: Sequence[Any], **named: Any) -> Any:
            guarded(self._observer, "host_tier", self._compare_before, transfers)
            guarded(self._observer, "host_tier", self._await, transfers)
            completion = original(transfers, **named)
            guarded(self._observer, "host_tier", self._compare, transfers)
            return completion

        return submit_host_to_device

    def _keep(self, transfers: Sequence[Any]) -> None:
        for transfer in transfers:
            # Packed drafts leave in the target's transfer, and come back in one of their own.
            for pool in (transfer.device_pool, *self._packed.get(id(transfer.device_pool), ())):
                records = self._records.get(id(pool))
                if records is not None:
                    name = self._groups[id(pool)]
                    found = self._observer.records_of(name, transfer.device_indices.to(torch.int64))
                    records[transfer.host_indices.cpu().long()] = 0 if found is None else found.cpu()

    def _compare_before(self, transfers: Sequence[Any]) -> None:
        for transfer in transfers:
            if (name := self._groups.get(id(transfer.device_pool))) is not None:
                self._observer.before_load(name, transfer.device_indices.cpu().to(torch.int64))

    def _await(self, transfers: Sequence[Any]) -> None:
        """Until they are compared, what will lie there is not what is known of it."""
        for transfer in transfers:
            if (name := self._groups.get(id(transfer.device_pool))) is not None:
                self._observer.awaited(name, transfer.device_indices.cpu().to(torch.int64))

    def _compare(self, transfers: Sequence[Any]) -> None:
        """The bytes are there: on a CPU nothing is under way when the call returns."""
        for transfer in transfers:
            if (name := self._groups.get(id(transfer.device_pool))) is None:
                continue
            records = self._records[id(transfer.device_pool)]
            slots = transfer.device_indices.cpu().to(torch.int64)
            sent = records[transfer.host_indices.cpu().long()]
            known = sent.any(1)
            self.compared += (compared := int(known.sum()))
            self.without += int(slots.numel()) - compared
            if compared:
                self._observer.received(name, slots[known], sent[known], HOST_PEER)
            if compared < slots.numel():
                self._observer.received(name, slots[~known])

    def _around_alloc(self, emptied: Sequence[Tensor]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """What is put into a host slot has no record until one came with it: the last content's is stale."""

        def around(original: Callable[..., Any]) -> Callable[..., Any]:
            def alloc(*given: Any, **named: Any) -> Any:
                slots = original(*given, **named)
                if slots is not None:
                    guarded(self._observer, "host_tier", _empty, emptied, slots)
                return slots

            return alloc

        return around

    # Between the host and the storage -------------------------------------------------------------------

    def _around_page_set(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def page_set(keys: Sequence[str], host_slots: Tensor, *more: Any) -> Any:
            there: list[bool] = []
            guarded(self._observer, "host_tier", self._find_stored, keys, there)
            done = original(keys, host_slots, *more)
            if done:
                guarded(self._observer, "host_tier", self._remember, keys, host_slots, there)
            return done

        return page_set

    def _around_page_get(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def page_get(operation: Any, keys: Sequence[str], host_slots: Tensor, *more: Any) -> Any:
            pages = original(operation, keys, host_slots, *more)
            guarded(self._observer, "host_tier", self._recall, keys[:pages], host_slots)
            return pages

        return page_get

    def _find_stored(self, keys: Sequence[str], there: list[bool]) -> None:
        """Which pages the storage has already: it keeps those, whose bytes may be another computation's."""
        there += [bool(self._controller.storage_backend.exists(key)) for key in keys]

    def _remember(self, keys: Sequence[str], host_slots: Tensor, there: Sequence[bool]) -> None:
        if not self._paged:
            return
        pages = host_slots.cpu().long().view(len(keys), -1)
        for key, slots, old in zip(keys, pages, there, strict=True):
            if not old:
                self._stored[key] = [records[slots] for records in self._paged]
        while len(self._stored) > _STORED_PAGES:
            self._stored.popitem(last=False)

    def _recall(self, keys: Sequence[str], host_slots: Tensor) -> None:
        size = int(self._controller.page_size)
        for number, key in enumerate(keys):
            slots = host_slots[number * size : (number + 1) * size].cpu().long()
            for index, records in enumerate(self._paged):
                records[slots] = self._stored[key][index] if key in self._stored else 0


def host_controller(scheduler: Any) -> Any | None:
    """What moves KV between device and host; None = this scheduler has no host tier."""
    arguments = settings_of(scheduler)
    if not arguments.enable_hierarchical_cache and arguments.disaggregation_mode != "decode":
        return None
    # A decode server has one for the requests that it takes back.
    return getattr(scheduler.tree_cache, "cache_controller", None)


def copied_to_host(controller: Any | None, pool: Any, *, packed: bool) -> bool:
    """Whether what moves KV copies this draft model's device pool; True without a host tier.

    To a host pool of its own; or, if `packed`, as further layers of the host slots of the target's full ones.
    """
    if controller is None:
        return True
    return any(
        entry.device_pool is pool
        or (packed and entry.is_primary_index_anchor and any(each is pool for each in packed_drafts(entry)))
        for entry in controller.mem_pool_host.entry_map.values()
    )


def packed_drafts(entry: Any) -> tuple[Any, ...]:
    """Device pools of draft models (MTP) whose KV lies in an entry's host slots, next to the target's."""
    return tuple(getattr(entry, "packed_draft_device_pools", ()))


def _empty(emptied: Sequence[Tensor], slots: Tensor) -> None:
    for records in emptied:
        records[slots.cpu().long()] = 0
