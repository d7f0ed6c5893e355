"""Which vLLM can be protected: versions and seams as data, checked before anything is touched."""

from __future__ import annotations

import inspect
from importlib import import_module

from canary_obs.errors import UnsupportedEngine

# 0.26 ran on an H200, the others on a CPU (tests/engines/vllm/real). There, with and without a canary, the V2
# model runner asks for Triton up to 0.28 and fails in 0.29, and 0.27 and 0.28 cannot do latent attention.
V1_VERSIONS = ("0.26", "0.27", "0.28", "0.29", "0.30", "0.31", "0.32")
V2_VERSIONS = ("0.26", "0.30", "0.31", "0.32")

WORKER = "vllm.v1.worker.worker_base:WorkerWrapperBase"

# module:class -> method -> the first parameters it must have after self.
SEAMS: dict[str, dict[str, tuple[str, ...]]] = {
    "vllm.v1.core.sched.scheduler:Scheduler": {"schedule": ()},
    "vllm.v1.core.block_pool:BlockPool": {
        "cache_full_blocks": (
            "request", "blocks", "num_cached_blocks", "num_full_blocks", "block_size", "kv_cache_group_id",
        ),
        "cache_partial_block": ("request", "block", "num_tokens", "kv_cache_group_id", "block_size"),
        "move_block_hashes": ("src_block", "dst_block"),
        "_remove_cached_block_hashes": ("block",),
        "reset_prefix_cache": (),
    },
    "vllm.v1.core.kv_cache_manager:KVCacheManager": {
        "allocate_slots": ("request", "num_new_tokens", "num_new_computed_tokens"),
        "get_block_ids": ("request_id",),
    },
    WORKER: {"initialize_from_config": ("kv_cache_configs",)},
}  # fmt: skip


def check_version(version: str, tried: tuple[str, ...] = V1_VERSIONS) -> None:
    """Raises UnsupportedEngine for a version nobody has tried."""
    release = ".".join(version.split(".")[:2])
    if release in tried:
        return
    other = ", VLLM_USE_V2_MODEL_RUNNER=0" if release in V1_VERSIONS else ""
    raise UnsupportedEngine(
        f"vLLM {version}{' with its V2 model runner' if other else ''}: supported are {', '.join(tried)}; "
        f"use a supported vLLM{other} or a newer canary_obs"
    )


def check_seams() -> None:
    """Raises UnsupportedEngine when a method is missing or takes other parameters."""
    for path, methods in SEAMS.items():
        for method, wanted in methods.items():
            owner = find_seam(path, method)
            found = tuple(inspect.signature(getattr(owner, method)).parameters)[1:] if owner else None
            if found is None or found[: len(wanted)] != wanted:
                raise UnsupportedEngine(
                    f"vLLM's {path}.{method} has parameters {found}, expected {wanted} first; "
                    "this build of vLLM differs from the supported ones, use a newer canary_obs"
                )


def find_seam(path: str, method: str) -> type | None:
    """The class `module:name` when it can be imported and has the method."""
    module, name = path.split(":")
    try:
        owner: type | None = getattr(import_module(module), name, None)
    except ImportError:
        return None
    return owner if hasattr(owner, method) else None
