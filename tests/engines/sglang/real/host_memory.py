"""Stand-ins for SGLang's host tier on a CPU: no pages to register with a driver, and copies by index."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any


def install() -> None:
    """For the rest of this process. For the I/O backend `direct` and the layout `layer_first`."""
    from sglang.srt.mem_cache import pool_host

    for module in pkgutil.iter_modules(pool_host.__path__):
        try:
            loaded = importlib.import_module(f"{pool_host.__name__}.{module.name}")
        except ImportError:  # of a device that this machine has not
            continue
        vars(loaded)["transfer_kv_direct"] = _copy
        for name in ("_cuda_host_register", "_cuda_host_unregister"):
            if name in vars(loaded):
                vars(loaded)[name] = lambda *_, **__: None


def _copy(src_layers: Any, dst_layers: Any, src_indices: Any, dst_indices: Any, page_size: int) -> None:
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices.long()] = source[src_indices.long()].to(target.dtype)
