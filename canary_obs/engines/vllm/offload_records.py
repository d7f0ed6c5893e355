"""Records of what vLLM's OffloadingConnector stores, and what its loads are compared with; in a worker."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from canary_obs.copy_records.stored_copies import MOST, Fold, Place, StoredCopies
from canary_obs.engine_api.observer import Observer
from canary_obs.engine_api.requests import ChangedRequests, KeyedBlocks
from canary_obs.engines.toolkit.block_slots import slots_of
from canary_obs.engines.toolkit.guarded import guarded
from canary_obs.engines.toolkit.method_patches import MethodPatches
from canary_obs.engines.vllm.groups import VllmGroup
from canary_obs.engines.vllm.offload_keys import KEYS_ATTRIBUTE, StoredKey
from canary_obs.engines.vllm.sent_blocks import each_metadata
from canary_obs.engines.vllm.sent_copies import Copies
from canary_obs.vocabulary import HOST_PEER

_Named = tuple[bytes, str]  # a StoredKey, as it is sent
_GROUP_BYTES = 4  # at the end of a key
_UNKNOWN = b""  # as in KeyedBlocks
_JOBS = 1 << 14  # that wait to be submitted


class _Part(NamedTuple):
    """What a job copies of one of vLLM's groups: under which keys, which blocks, and their places there."""

    number: int
    named: list[StoredKey]
    blocks: list[int]
    places: list[int]


class OffloadRecords:
    """Follows the jobs of one OffloadingConnector, from the scheduler's output to their submission.

    A store's fingerprints come from the records of its source blocks, which vLLM keeps until it is done:
    they are read once the step's forward was launched, while a GPU is busy with it.
    """

    def __init__(
        self, groups: Sequence[VllmGroup], copies: Copies, observer: Observer, stored: StoredCopies,
        show_requests: Callable[[], None],
    ) -> None:  # fmt: skip
        """`show_requests`: shows the changes of the step under way, if that was not done yet."""
        self._copies, self._observer, self._show_requests = copies, observer, show_requests
        self._groups = {
            number: [group for group in groups if group.number == number]
            for number in {group.number for group in groups}
        }
        self._jobs: dict[int, Mapping[int, _Named]] = {}  # by job: the keys of its step, by chunk
        # Stores of the step under way, and of folds that are on their way to the host; with each the keys
        # whose files were there before: what is stored now is not in those.
        self._submitted: list[tuple[list[_Part], Collection[bytes]]] = []
        self._fetches: list[tuple[Fetch, Collection[bytes]]] = []
        self._stored = stored
        self._per_chunk = 1
        self._worker: Any = None  # of the connector
        self.shown = False  # which blocks are stored and loaded, as `ChangedRequests` has it

    def wrap(self, patches: MethodPatches, connector: Any) -> None:
        """Follow the submissions of this connector's worker."""
        own = connector.connector_worker
        self._worker = own.worker
        self.shown = is_followed(
            own, [number for number, (first, *_) in self._groups.items() if first.of_tokens]
        )
        self._per_chunk = int(own.spec.blocks_per_chunk)
        patches.wrap(own.worker, "submit_store", self._around_store)
        patches.wrap(own.worker, "submit_load", self._around_load)

    def follow(self, metadata: Any, keys: Mapping[int, _Named]) -> None:
        """Jobs of a scheduler output, with the keys of its chunks: a step later a chunk may hold another."""
        self._read_stores()  # of a step that has failed
        while len(self._jobs) > _JOBS:  # stores that another rank makes for this one
            del self._jobs[next(iter(self._jobs))]
        if keys:
            self._jobs.update(dict.fromkeys((*metadata.store_jobs, *metadata.load_jobs), keys))

    def _around_store(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def submit_store(job_id: int, src_spec: Any, dst_spec: Any, *args: Any, **kwargs: Any) -> Any:
            submitted = original(job_id, src_spec, dst_spec, *args, **kwargs)
            guarded(self._observer, "announce", self._submit, job_id, src_spec, dst_spec)
            return submitted

        return submit_store

    def _around_load(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def submit_load(job_id: int, src_spec: Any, dst_spec: Any, *args: Any, **kwargs: Any) -> Any:
            submitted = original(job_id, src_spec, dst_spec, *args, **kwargs)
            guarded(self._observer, "announce", self._load, job_id, dst_spec, src_spec)
            return submitted

        return submit_load

    def launched(self) -> None:
        """The step's forward was launched, and no record was changed since its copies were submitted."""
        guarded(self._observer, "announce", self._keep_stores)

    def _keep_stores(self) -> None:
        self._read_stores()
        self._take()

    def _read_stores(self) -> None:
        submitted, self._submitted = self._submitted, []
        for parts, existed in submitted:
            self._store(parts, existed)

    def _store(self, parts: Sequence[_Part], existed: Collection[bytes]) -> None:
        for number, named, blocks, places in parts:
            for group in self._groups.get(number, ()):
                folds = folds_of(blocks, group, self._observer)
                if folds is not None:
                    self._fetches.append((Fetch(group.view.name, named, places, folds), existed))

    def _submit(self, job: int, device: Any, tier: Any) -> None:
        """Before a forward that may fill these blocks anew: vLLM lets it wait for the copy then."""
        parts, unnamed = self._parts(job, device, tier)
        files = [named for part in parts for named in part.named if named.path]
        existed = {named.key for named in files if os.path.exists(named.path)}
        self._submitted.append((parts, existed))
        if self.shown:
            self._show_requests()
            stored = {str(part.number): KeyedBlocks(_keys(part), np.array(part.blocks)) for part in parts}
            self._observer.requests_changed(ChangedRequests(stored=self._unknown(unnamed) or stored))

    def _load(self, job: int, device: Any, tier: Any) -> None:
        self._copies.ends.append(end_of(self._worker, job))
        self._keep_stores()
        parts, unnamed = self._parts(job, device, tier)
        loaded = {}
        for part in parts:
            number, named, blocks, places = part
            # With a tier of files below, nobody says which of the two it came from.
            peer = "" if any(each.path for each in named) else HOST_PEER
            keys = _keys(part)
            for group in self._groups.get(number, ()):
                found = self._stored.find_all(group.view.name, named, places)
                self._copies.put(group.view.name, blocks, group.block_slots, found, peer)
                # Else a copy of damage would not be found when it is loaded.
                compared = (0 < len(folds) <= MOST for folds in found)
                keys = [key if own else _UNKNOWN for key, own in zip(keys, compared, strict=True)]
            loaded[str(number)] = KeyedBlocks(keys, np.array(blocks))
        if self.shown:
            self._show_requests()
            lost = self._unknown(device.block_ids.tolist() if unnamed else [])
            self._observer.requests_changed(ChangedRequests(loaded=lost or loaded))

    def _unknown(self, blocks: list[int]) -> dict[str, KeyedBlocks]:
        """Some block of a job has no key, which would name its group: nothing is known of any."""
        keys = [_UNKNOWN] * len(blocks)
        return {str(number): KeyedBlocks(keys, np.array(blocks)) for number in self._groups if blocks}

    def _parts(self, job: int, device: Any, tier: Any) -> tuple[list[_Part], list[int]]:
        """What a job copies, by vLLM's group, and blocks whose keys are not known."""
        keys = self._jobs.pop(job, None)
        if keys is None and not self.shown:
            return [], []
        found, unnamed = dict[bytes, _Part](), list[int]()
        for block, chunk, place in parts_of(device, tier, self._per_chunk).tolist():
            if keys is None or (named := keys.get(chunk)) is None:
                unnamed.append(block)
                continue
            group = named[0][-_GROUP_BYTES:]
            own = found.get(group)
            if own is None:
                own = found[group] = _Part(int.from_bytes(group, "big"), [], [], [])
            own.named.append(StoredKey._make(named))
            own.blocks.append(block)
            own.places.append(place)
        return list(found.values()), unnamed

    def _take(self) -> None:
        """Keep the fingerprints that have reached the host, in the order of their stores."""
        while self._fetches and self._fetches[0][0].ready:
            fetch, existed = self._fetches.pop(0)
            for named, folds in fetch.by_key():
                self._stored.add(named.key, folds, named.path, existed=named.key in existed)


def end_of(worker: Any, job: int) -> torch.Event | None:
    """After which event the copy of a load is made that was just submitted; None = it is not seen.

    That is how the CPU tier of vLLM 0.33 keeps it. Its events are used again once a copy is reported.
    """
    for name in ("_load_handler", "_expedited_load_handler"):
        transfers = getattr(getattr(worker, name, None), "_transfers", None)
        if transfers and getattr(transfers[-1], "job_id", None) == job:
            end = getattr(transfers[-1], "end_event", None)
            return end if isinstance(end, torch.Event) else None
    return None


def folds_of(blocks: Sequence[int], group: VllmGroup, observer: Observer) -> Tensor | None:
    """Of whole blocks, from their records; see `Observer.block_folds`."""
    slots = slots_of(blocks, group.block_slots).view(len(blocks), group.block_slots)
    return observer.block_folds(group.view.name, slots, baselines=group.states)


def is_followed(worker: Any, numbers: Collection[int]) -> bool:
    """Whether all that a connector's worker may load is shown, of vLLM's groups with these numbers.

    Not what others stored: another rank, or tiers below. Nor groups whose blocks are not shown.
    """
    manager = getattr(type(worker.spec), "get_manager", None)
    config = getattr(worker, "kv_cache_config", None)
    return (
        getattr(manager, "__module__", "").startswith("vllm.v1.kv_offload.")
        and not getattr(worker.spec, "secondary_tier_configs", ())
        and getattr(worker, "_is_store_writer", True)
        and config is not None
        and set(range(len(config.kv_cache_groups))) <= set(numbers)
    )


def _keys(part: _Part) -> list[bytes]:
    return [
        named.key + place.to_bytes(4, "big") for named, place in zip(part.named, part.places, strict=True)
    ]


class Fetch:
    """Folds on their way to the host."""

    def __init__(self, name: str, named: Sequence[StoredKey], places: Sequence[int], folds: Tensor) -> None:
        self._name, self._named, self._places = name, named, places
        self._event: Any = None
        self._folds = folds
        if folds.is_cuda:
            self._folds = torch.empty(folds.shape, dtype=folds.dtype, pin_memory=True)
            self._folds.copy_(folds, non_blocking=True)
            self._event = torch.Event(folds.device)
            self._event.record()

    @property
    def ready(self) -> bool:
        """Whether they are there."""
        return self._event is None or bool(self._event.query())

    def by_key(self) -> Iterator[tuple[StoredKey, dict[Place, Fold | None]]]:
        """What was found of each copy."""
        keys: dict[StoredKey, dict[Place, Fold | None]] = {}
        for named, place, (whole, k, v) in zip(self._named, self._places, self._folds.tolist(), strict=True):
            own = keys.get(named)
            if own is None:
                own = keys[named] = {}
            own[self._name, place] = (k, v) if whole else None
        return iter(keys.items())


def parts_of(device: Any, tier: Any, per_chunk: int) -> NDArray[np.int64]:
    """[n, 3]: block, chunk and place in it of each copy that a job orders; see vLLM's GPULoadStoreSpec."""
    blocks, chunks = device.block_ids, tier.block_ids
    held, places = list[NDArray[np.int64]](), list[NDArray[np.int64]]()
    first_chunk = 0
    for size, first in zip(device.group_sizes, device.block_indices, strict=True):
        if size:
            chunk, place = np.divmod(np.arange(int(size)) + first % per_chunk, per_chunk)
            held.append(chunk + first_chunk)
            places.append(place)
            first_chunk += int(chunk[-1]) + 1
    if not held:
        return np.empty((0, 3), dtype=np.int64)
    order = np.concatenate(held)
    return np.stack((blocks[: order.size], chunks[order], np.concatenate(places)), 1)


def jobs_of(output: Any) -> Iterator[tuple[Any, dict[int, _Named]]]:
    """The metadata of each OffloadingConnector in a scheduler output, with the keys of its chunks."""
    keys = getattr(output, KEYS_ATTRIBUTE, ())
    found = [each for each in each_metadata(output.kv_connector_metadata) if hasattr(each, "store_jobs")]
    yield from zip(found, keys, strict=False)
