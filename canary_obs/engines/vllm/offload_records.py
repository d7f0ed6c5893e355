"""Records of what vLLM's OffloadingConnector stores, and what its loads are compared with; in a worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from canary_obs.copy_records.stored_copies import Fold, Place, StoredCopies
from canary_obs.engine_api.observer import Observer
from canary_obs.engines.toolkit.guarded import guarded
from canary_obs.engines.toolkit.method_patches import MethodPatches
from canary_obs.engines.vllm.groups import VllmGroup
from canary_obs.engines.vllm.offload_keys import KEYS_ATTRIBUTE, StoredKey
from canary_obs.engines.vllm.sent_blocks import each_metadata
from canary_obs.engines.vllm.sent_copies import Copies
from canary_obs.vocabulary import HOST_PEER

_Named = tuple[bytes, str]  # a StoredKey, as it is sent
_GROUP_BYTES = 4  # at the end of a key
_JOBS = 1 << 14  # that wait to be submitted


class OffloadRecords:
    """Follows the jobs of one OffloadingConnector, from the scheduler's output to their submission.

    A store's fingerprints come from the records of its source blocks, which vLLM keeps until it is done:
    they are read once the step's forward was launched, while a GPU is busy with it.
    """

    def __init__(
        self, groups: Sequence[VllmGroup], copies: Copies, observer: Observer, stored: StoredCopies
    ) -> None:
        self._copies, self._observer = copies, observer
        self._groups = {
            number: [group for group in groups if group.number == number]
            for number in {group.number for group in groups}
        }
        self._jobs: dict[int, Mapping[int, _Named]] = {}  # by job: the keys of its step, by chunk
        self._submitted: list[tuple[int, Any, Any]] = []  # stores of the step under way
        self._fetches: list[Fetch] = []
        self._stored = stored
        self._per_chunk = 1

    def wrap(self, patches: MethodPatches, connector: Any) -> None:
        """Follow the submissions of this connector's worker."""
        own = connector.connector_worker
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
            self._submitted.append((job_id, src_spec, dst_spec))
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
        for job, device, tier in submitted:
            self._store(job, device, tier)

    def _store(self, job: int, device: Any, tier: Any) -> None:
        for groups, (named, blocks, places) in self._parts(job, device, tier):
            for group in groups:
                starts = torch.tensor(blocks, dtype=torch.int64) * group.block_size
                folds = self._observer.block_folds(
                    group.view.name, starts[:, None] + torch.arange(group.block_size)
                )
                if folds is not None:
                    self._fetches.append(Fetch(group.view.name, named, places, folds))

    def _load(self, job: int, device: Any, tier: Any) -> None:
        self._keep_stores()
        for groups, (named, blocks, places) in self._parts(job, device, tier):
            # With a tier of files below, nobody says which of the two it came from.
            peer = "" if any(each.path for each in named) else HOST_PEER
            for group in groups:
                found = self._stored.find_all(group.view.name, named, places)
                self._copies.put(group.view.name, blocks, group.block_size, found, peer)

    def _parts(
        self, job: int, device: Any, tier: Any
    ) -> Iterator[tuple[Sequence[VllmGroup], tuple[list[StoredKey], list[int], list[int]]]]:
        """By vLLM's group: what a job copies under which keys, its blocks, and their places in the copies."""
        keys = self._jobs.pop(job, None)
        if keys is None:
            return
        found: dict[bytes, tuple[list[StoredKey], list[int], list[int]]] = {}
        for block, chunk, place in parts_of(device, tier, self._per_chunk).tolist():
            if (named := keys.get(chunk)) is not None:
                own = found.setdefault(named[0][-_GROUP_BYTES:], ([], [], []))
                own[0].append(StoredKey._make(named))
                own[1].append(block)
                own[2].append(place)
        for number, own in found.items():
            yield self._groups.get(int.from_bytes(number, "big"), ()), own

    def _take(self) -> None:
        """Keep the fingerprints that have reached the host, in the order of their stores."""
        while self._fetches and self._fetches[0].ready:
            for named, folds in self._fetches.pop(0).by_key():
                self._stored.add(named.key, folds, named.path)


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
