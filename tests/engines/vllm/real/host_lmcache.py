"""Lets LMCache run in vLLM where the KV cache itself lies in CPU memory: it has no such connector of its own.

Copying between blocks and LMCache's memory is replaced; its engine, keys, tiers and files are its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

CHUNK = 64  # tokens: two blocks


class HostConnector:
    """Copies whole blocks only: what a CPU's attention keeps in one is not a row per token."""

    skip = False  # leave copies to blocks out, and report them as made

    def __init__(self, metadata: Any) -> None:
        self.metadata, self.kvcaches = metadata, None

    def initialize_kvcaches_ptr(self, **named: Any) -> None:
        """LMCache gives them with each call."""
        self.kvcaches = named.get("kvcaches", self.kvcaches)

    def get_shape(self, tokens: int) -> Any:
        """Of a memory object: K and V, layers, tokens, all heads' values."""
        layers, two, _, heads, size = self.metadata.kv_shape
        return torch.Size([two, layers, tokens, heads * size])

    def batched_from_gpu(
        self, objects: Sequence[Any], starts: Sequence[int], ends: Sequence[int], **named: Any
    ) -> None:
        """Fill the objects."""
        for kept, start, end in zip(objects, starts, ends, strict=True):
            caches, blocks, offsets = self._places(start, end, named)
            for layer, cache in enumerate(caches):
                rows = cache[blocks, :, offsets]
                half = rows.shape[-1] // 2
                kept.tensor[0, layer] = rows[..., :half].reshape(end - start, -1)
                kept.tensor[1, layer] = rows[..., half:].reshape(end - start, -1)

    def batched_to_gpu(
        self, objects: Sequence[Any], starts: Sequence[int], ends: Sequence[int], **named: Any
    ) -> None:
        """Fill the blocks."""
        if self.skip:
            return
        for kept, start, end in zip(objects, starts, ends, strict=True):
            caches, blocks, offsets = self._places(start, end, named)
            for layer, cache in enumerate(caches):
                heads = cache.shape[1]
                parts = [kept.tensor[part, layer].reshape(end - start, heads, -1) for part in (0, 1)]
                cache[blocks, :, offsets] = torch.cat(parts, -1).to(cache.dtype)

    def _places(self, start: int, end: int, named: dict[str, Any]) -> tuple[list[Any], Any, Any]:
        kvcaches = named.get("kvcaches") or self.kvcaches
        caches = list(kvcaches.values()) if isinstance(kvcaches, dict) else list(kvcaches)
        slots, size = named["slot_mapping"][start:end], caches[0].shape[2]
        return caches, slots // size, slots % size


def install(patch: Callable[..., None]) -> None:
    """When vLLM makes its connector, not before: vLLM stumbles over modules that LMCache imports."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    original = KVConnectorFactory.create_connector.__func__

    def create_with_host(cls: Any, *args: Any, **kwargs: Any) -> Any:
        import lmcache.v1.gpu_connector as made

        made.CreateGPUConnector = lambda config, metadata, *_, **__: HostConnector(metadata)
        return original(cls, *args, **kwargs)

    patch(KVConnectorFactory, "create_connector", classmethod(create_with_host))


def environment(disk: Path, files: Path) -> dict[str, str]:
    """Of an engine with three tiers: memory, a disk of its own, and files that engines may share."""
    return {
        "LMCACHE_TRACK_USAGE": "false", "LMCACHE_CHUNK_SIZE": str(CHUNK), "LMCACHE_LOG_LEVEL": "ERROR",
        "LMCACHE_LOCAL_CPU": "True", "LMCACHE_MAX_LOCAL_CPU_SIZE": "0.2",
        "LMCACHE_LOCAL_DISK": f"file://{disk}/", "LMCACHE_MAX_LOCAL_DISK_SIZE": "0.2",
        "LMCACHE_REMOTE_URL": f"fs://host:0{files}/", "LMCACHE_REMOTE_SERDE": "naive",
    }  # fmt: skip


TRANSFER = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
