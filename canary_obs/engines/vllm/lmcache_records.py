"""Records of what LMCache keeps of a worker's KV in its tiers, and what its loads are compared with."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from canary_obs.copy_records.stored_copies import StoredCopies
from canary_obs.engine_api.observer import Observer
from canary_obs.engines.toolkit.guarded import guarded
from canary_obs.engines.toolkit.method_patches import MethodPatches
from canary_obs.engines.vllm.connector_loads import ConnectorLoads
from canary_obs.engines.vllm.forward_stores import ForwardStores, Store
from canary_obs.engines.vllm.groups import VllmGroup
from canary_obs.engines.vllm.offload_keys import StoredKey
from canary_obs.engines.vllm.pool_events import Loaded
from canary_obs.engines.vllm.sent_blocks import each_metadata
from canary_obs.vocabulary import HOST_PEER

_OWN_TIERS = {"LocalCPUBackend", "LocalDiskBackend"}  # nobody else writes them
_EXACT = "NaiveSerializer"  # others return other bytes than they were given


class LmcacheRecords:
    """Follows one LMCacheConnectorV1 of a worker: it keeps whole blocks in chunks, by a hash of their tokens.

    Layerwise stores and loads, blended chunks, and tiers that other hosts write are not followed.
    """

    def __init__(
        self, groups: Sequence[VllmGroup], loads: ConnectorLoads, observer: Observer, stored: StoredCopies
    ) -> None:
        # It is given the blocks of the first group alone.
        self._groups = [group for group in groups if group.number == 0 and not group.states]
        self._loads, self._observer, self._stored = loads, observer, stored
        self.stores = ForwardStores(self._groups, observer, stored)
        self._engine: Any = None
        self._slots: dict[str, Any] = {}  # by request of the step under way, int64 [tokens], on the CPU
        self._copied: tuple[Any, list[int], list[int], str] | None = None  # what is about to be put

    def wrap(self, patches: MethodPatches, connector: Any) -> bool:
        """Follow this connector's engine. False = its tiers cannot be followed: loads are unverified."""
        self._engine = engine = getattr(connector._lmcache_engine, "lmcache_engine", None)
        if engine is None or not self._groups or not _followed(engine):
            return False
        for name in ("_process_tokens_internal", "_async_process_tokens_internal"):
            patches.wrap(engine, name, self._around_found)
        patches.wrap(engine.gpu_connector, "batched_from_gpu", self._around_copy)
        patches.wrap(engine.storage_manager, "batched_put", self._around_put)
        return True

    def follow(self, output: Any) -> None:
        """What a scheduler output says is stored and loaded with its forward."""
        self.stores.begin_forward()
        self._slots, self._copied = {}, None
        for metadata in each_metadata(output.kv_connector_metadata):
            if type(metadata).__name__ != "LMCacheConnectorMetadata":
                continue
            for request in metadata.requests:
                self._slots[request.req_id] = request.slot_mapping
                load = request.load_spec
                if load is not None and load.can_load:
                    self._follow_rewritten(request, load.vllm_cached_tokens)

    def _follow_rewritten(self, request: Any, cached: int) -> None:
        """A chunk is loaded whole, also over blocks of it that were found in the prefix cache."""
        size, chunk = self._groups[0].block_size, int(self._engine.config.chunk_size)
        first = cached // chunk * chunk
        end = cached // size * size
        blocks = tuple(block for _, block in self._blocks(request.req_id, first, end))
        if blocks:
            loads = [Loaded(0, blocks, first // size, first, end, request.req_id)]
            tokens = np.asarray(request.token_ids[:cached], dtype=np.int32).tobytes()
            self._loads.rewritten(f"{request.req_id}: rewritten", loads, tokens, self._observer)

    def _blocks(self, request: str, start: int, end: int) -> list[tuple[int, int]]:
        """Places in a chunk, and the blocks that lie whole in it."""
        size, slots = self._groups[0].block_size, self._slots.get(request)
        if slots is None or start % size:
            return []
        whole = (end - start) // size * size
        return list(enumerate((slots[start : start + whole : size] // size).tolist()))

    def _around_found(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Of what finds a request's chunks in the tiers, before they are copied to its blocks."""

        def process_tokens(*args: Any, **kwargs: Any) -> Any:
            found = original(*args, **kwargs)
            guarded(self._observer, "announce", lambda: self._expect(found[0], kwargs.get("req_id", "")))
            return found

        return process_tokens

    def _expect(self, chunks: Sequence[tuple[Any, Any, int, int]], request: str) -> None:
        self.stores.take()
        for key, _, start, end in chunks:
            named, size = self._named(key), self._groups[0].block_size
            peer = "" if named.path else HOST_PEER
            known, blocks = self._stored.copies(named.key, named.path), self._blocks(request, start, end)
            for group in self._groups:
                name = group.view.name
                sent = [known.get((name, place)) or () for place, _ in blocks]
                self._loads.copies.put(name, [block for _, block in blocks], size, sent, peer)

    def _around_copy(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def batched_from_gpu(objects: Any, starts: Any, ends: Any, *args: Any, **kwargs: Any) -> Any:
            self._copied = objects, list(starts), list(ends), kwargs.get("req_id", "")
            return original(objects, starts, ends, *args, **kwargs)

        return batched_from_gpu

    def _around_put(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def batched_put(keys: Any, objects: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                copied, self._copied = self._copied, None
                if copied is not None and copied[0] is objects:
                    self._store(keys, *copied[1:])
            except Exception as error:  # noqa: BLE001 - a fault of the canary must not reach the engine
                self._observer.fault("announce", error)
            return original(keys, objects, *args, **kwargs)

        return batched_put

    def _store(self, keys: Sequence[Any], starts: list[int], ends: list[int], request: str) -> None:
        for key, start, end in zip(keys, starts, ends, strict=True):
            if blocks := self._blocks(request, start, end):
                named = self._named(key)
                # A file that is there is written again, but by whom it was is not known without a record.
                existed = bool(named.path) and os.path.exists(named.path)
                existed = existed and not self._stored.described(named.key, named.path)
                self.stores.note(Store(named, blocks, existed))

    def _named(self, key: Any) -> StoredKey:
        paths = [str(files._get_file_path(key)) for files in _file_tiers(self._engine)]
        return StoredKey(key.to_string().encode(), paths[0] if paths else "")


def _followed(engine: Any) -> bool:
    """Whether what comes out of the tiers was put there by this worker, or has a file for records."""
    if engine.config.enable_blending or engine.config.use_layerwise:
        return False
    backends = engine.storage_manager.storage_backends.values()
    others = [backend for backend in backends if type(backend).__name__ not in _OWN_TIERS]
    return len(others) == len(list(_file_tiers(engine))) <= 1


def _file_tiers(engine: Any) -> Iterator[Any]:
    """The connections of remote tiers that keep a chunk in a file, with the bytes that it is given."""
    for backend in engine.storage_manager.storage_backends.values():
        connection = getattr(backend, "connection", None)
        connection = getattr(connection, "_connector", connection)
        if (
            type(connection).__name__ == "FSConnector"
            and type(getattr(backend, "serializer", None)).__name__ == _EXACT
        ):
            yield connection
