"""Records of what vLLM's OffloadingConnector stores, and what its loads are compared with; in a worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from canary_obs.copy_records.stored_copies import Fold, Place, StoredCopies
from canary_obs.engine_api.observer import Observer
from canary_obs.engines.toolkit.method_patches import MethodPatches
from canary_obs.engines.vllm.groups import VllmGroup
from canary_obs.engines.vllm.loaded_blocks import Copies, SentCopies
from canary_obs.engines.vllm.offload_keys import KEYS_ATTRIBUTE, StoredKey
from canary_obs.engines.vllm.sent_blocks import each_metadata
from canary_obs.vocabulary import HOST_PEER

_GROUP_BYTES = 4  # at the end of a key
_JOBS = 1 << 14  # that wait to be submitted


class Part(NamedTuple):
    """One device block of a job: the chunk of the tier, and the block's place in it."""

    block: int
    chunk: int
    place: int


class OffloadRecords:
    """Follows the jobs of one OffloadingConnector, from the scheduler's output to their submission.

    A store's fingerprints come from the records of its source blocks, which vLLM keeps until it is done.
    """

    def __init__(
        self, groups: Sequence[VllmGroup], copies: Copies, observer: Observer, stored: StoredCopies
    ) -> None:
        self._copies, self._observer = copies, observer
        self._groups = {
            number: [group for group in groups if group.number == number]
            for number in {group.number for group in groups}
        }
        self._jobs: dict[int, dict[int, StoredKey]] = {}  # by job: its keys by chunk
        self._fetches: list[Fetch] = []
        self._stored = stored
        self._per_chunk = 1

    def wrap(self, patches: MethodPatches, connector: Any) -> None:
        """Follow the submissions of this connector's worker."""
        own = connector.connector_worker
        self._per_chunk = int(own.spec.blocks_per_chunk)
        patches.wrap(own.worker, "submit_store", self._around_store)
        patches.wrap(own.worker, "submit_load", self._around_load)

    def follow(self, metadata: Any, keys: dict[int, StoredKey]) -> None:
        """Jobs of a scheduler output, with the keys of its chunks: a step later a chunk may hold another."""
        self._take()
        while len(self._jobs) > _JOBS:  # stores that another rank makes for this one
            del self._jobs[next(iter(self._jobs))]
        for jobs in (metadata.store_jobs, metadata.load_jobs):
            for number, job in jobs.items():
                tier = job.dst_spec if jobs is metadata.store_jobs else job.src_spec
                chunks = tier.block_ids.tolist()
                self._jobs[number] = {chunk: keys[chunk] for chunk in chunks if chunk in keys}

    def _around_store(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def submit_store(job_id: int, src_spec: Any, dst_spec: Any, *args: Any, **kwargs: Any) -> Any:
            submitted = original(job_id, src_spec, dst_spec, *args, **kwargs)
            self._guarded(self._store, job_id, src_spec, dst_spec)
            return submitted

        return submit_store

    def _around_load(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def submit_load(job_id: int, src_spec: Any, dst_spec: Any, *args: Any, **kwargs: Any) -> Any:
            submitted = original(job_id, src_spec, dst_spec, *args, **kwargs)
            self._guarded(self._load, job_id, dst_spec, src_spec)
            return submitted

        return submit_load

    def _guarded(self, follow: Callable[[int, Any, Any], None], job: int, device: Any, tier: Any) -> None:
        try:
            follow(job, device, tier)
        except Exception as error:  # noqa: BLE001 - a fault of the canary must not reach the engine
            self._observer.fault("announce", error)

    def _store(self, job: int, device: Any, tier: Any) -> None:
        keys = self._jobs.pop(job, {})
        by_group: dict[str, list[tuple[StoredKey, Part]]] = {}
        for part in parts_of(device, tier, self._per_chunk):
            if (named := keys.get(part.chunk)) is not None:
                for group in self._groups_of(named):
                    by_group.setdefault(group.view.name, []).append((named, part))
        sizes = {group.view.name: group.block_size for found in self._groups.values() for group in found}
        for name, found in by_group.items():
            starts = torch.tensor([part.block for _, part in found], dtype=torch.int64) * sizes[name]
            folds = self._observer.block_folds(name, starts[:, None] + torch.arange(sizes[name]))
            if folds is not None:
                self._fetches.append(Fetch(name, found, folds))
        self._take()

    def _load(self, job: int, device: Any, tier: Any) -> None:
        self._take()
        keys = self._jobs.pop(job, {})
        for part in parts_of(device, tier, self._per_chunk):
            named = keys.get(part.chunk)
            for group in self._groups_of(named):
                assert named is not None
                name = group.view.name
                found = self._stored.find(named.key, (name, part.place), named.path)
                # With a tier of files below, nobody says which of the two it came from.
                peer = HOST_PEER if named.path is None else ""
                self._copies[name, part.block] = SentCopies(group.block_size, found, peer)

    def _groups_of(self, named: StoredKey | None) -> Sequence[VllmGroup]:
        number = -1 if named is None else int.from_bytes(named.key[-_GROUP_BYTES:], "big")
        return self._groups.get(number, ())

    def _take(self) -> None:
        """Keep the fingerprints that have reached the host, in the order of their stores."""
        while self._fetches and self._fetches[0].ready:
            for named, folds in self._fetches.pop(0).by_key():
                self._stored.add(named.key, folds, named.path)


class Fetch:
    """Folds on their way to the host."""

    def __init__(self, name: str, found: Sequence[tuple[StoredKey, Part]], folds: Tensor) -> None:
        self._name, self._found = name, found
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
        for (named, part), (whole, k, v) in zip(self._found, self._folds.tolist(), strict=True):
            keys.setdefault(named, {})[self._name, part.place] = (k, v) if whole else None
        return iter(keys.items())


def parts_of(device: Any, tier: Any, per_chunk: int) -> Iterator[Part]:
    """The copies that a job orders, block by block; see vLLM's GPULoadStoreSpec."""
    blocks, chunks = device.block_ids.tolist(), tier.block_ids.tolist()
    block_at = chunk_at = 0
    for size, first in zip(device.group_sizes, device.block_indices, strict=True):
        if size:
            skipped = first % per_chunk
            for number in range(size):
                chunk, place = divmod(skipped + number, per_chunk)
                yield Part(blocks[block_at + number], chunks[chunk_at + chunk], place)
            block_at += size
            chunk_at += -(-(size + skipped) // per_chunk)


def jobs_of(output: Any) -> Iterator[tuple[Any, dict[int, StoredKey]]]:
    """The metadata of each OffloadingConnector in a scheduler output, with the keys of its chunks."""
    keys = getattr(output, KEYS_ATTRIBUTE, ())
    found = [each for each in each_metadata(output.kv_connector_metadata) if hasattr(each, "store_jobs")]
    yield from zip(found, keys, strict=False)
