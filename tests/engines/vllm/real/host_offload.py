"""Lets vLLM's OffloadingConnector run with KV that lies in CPU memory; on a GPU all is vLLM's own.

Streams, events, the copy and one assertion are replaced. The worker with its handlers, the memory and file
tiers, the scheduler's side and all bookkeeping are vLLM's own.
"""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path
from typing import Any

import torch
import vllm.v1.kv_offload.cpu.gpu_worker as gpu_worker
from vllm.v1.kv_offload.base import CanonicalKVCaches, CanonicalKVCacheTensor
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class Copies:
    """How blocks are copied; a test may leave copies out, or exchange their sources."""

    skip = False
    late: list[tuple[int, int, int]] | None = None  # copies that are made when the test says so

    def __call__(self, sources: Any, destinations: Any, sizes: Any, **_: Any) -> None:
        jobs = zip(sources.tolist(), destinations.tolist(), sizes.tolist(), strict=True)
        for source, destination, size in jobs:
            if self.late is not None:
                self.late.append((destination, source, size))
            elif not self.skip:
                ctypes.memmove(destination, source, size)

    def arrive(self) -> None:
        """Make the copies that are late."""
        late, self.late = self.late or [], None
        for destination, source, size in late:
            ctypes.memmove(destination, source, size)


COPIES = Copies()


class _OnDevice(torch.Tensor):
    is_cuda = True


class _Event:
    def record(self, stream: Any = None) -> None:
        """Nothing runs apart from the host."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Done already."""

    def elapsed_time(self, other: Any) -> float:
        return 0.01


class _Stream:
    def wait_stream(self, other: Any) -> None:
        """Nothing runs apart from the host."""

    def wait_event(self, event: Any) -> None:
        """Nothing runs apart from the host."""


class _Instead:
    """A module or object with some names replaced."""

    def __init__(self, real: Any, **names: Any) -> None:
        self._real = real
        self.__dict__.update(names)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def _install() -> None:
    if isinstance(gpu_worker.torch, _Instead):
        return
    gpu_worker.torch = _Instead(torch, Event=lambda **_: _Event())
    gpu_worker.current_platform = _Instead(
        gpu_worker.current_platform, Stream=_Stream, current_stream=_Stream,
        stream=lambda _: contextlib.nullcontext(),
    )  # fmt: skip
    gpu_worker.ops = _Instead(gpu_worker.ops, swap_blocks_batch=COPIES)
    gpu_worker._select_swap_blocks_fn = lambda *_, **__: COPIES


class HostSpec(TieringOffloadingSpec):
    """Memory tier, and file tier if one is asked for, for KV on the host."""

    def get_worker(self, kv_caches: Any) -> Any:
        if kv_caches.tensors[0].tensor.is_cuda:
            return super().get_worker(kv_caches)
        _install()
        if not self._worker:
            tensors = [
                CanonicalKVCacheTensor(given.tensor.as_subclass(_OnDevice), given.page_size_bytes)
                for given in kv_caches.tensors
            ]
            self._worker = self.create_worker(CanonicalKVCaches(tensors, kv_caches.group_data_refs))
        return self._worker


def transfer_config(files: Path | None = None, per_chunk: int = 1) -> dict[str, Any]:
    """What an engine is given to offload to memory, and to files."""
    extra: dict[str, Any] = {
        "cpu_bytes_to_use": 1 << 24, "spec_name": "HostSpec", "spec_module_path": __name__,
    }  # fmt: skip
    if per_chunk > 1:
        extra["blocks_per_chunk"] = per_chunk
    if files is not None:
        tier = {"type": "fs", "root_dir": str(files), "n_read_threads": 1, "n_write_threads": 1}
        extra["secondary_tiers"] = [tier]
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
