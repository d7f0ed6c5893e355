"""The supported SGLang versions, and the methods that must exist there; checked before anything changes."""

from __future__ import annotations

from canary_obs.engines.toolkit.engine_methods import check_methods
from canary_obs.errors import UnsupportedEngine

# With the device that each was tested on: 0.5.23 by tests/engines/sglang/real, 0.5.16 by bench sglang-gpu.
DEVICES = {"0.5.16": "cuda", "0.5.23": "cpu"}
VERSIONS = tuple(DEVICES)

SCHEDULER = "sglang.srt.managers.scheduler:Scheduler"
WEIGHT_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater:SchedulerWeightUpdaterManager"
_DISAGGREGATION = "sglang.srt.disaggregation."
_PAGED = "sglang.srt.mem_cache.allocator.paged:PagedTokenToKVPoolAllocator"
_UNIFIED = "sglang.srt.mem_cache.unified_memory_pool:Unified"
_MOVE: dict[str, tuple[str, ...]] = {"move_physical_pages": ("tgt_pages", "src_pages", "page_size")}

# Methods that are wrapped or called: module:class -> method -> its first parameters after self.
HOOKS: dict[str, dict[str, tuple[str, ...]]] = {
    SCHEDULER: {"run_batch": ("batch",), "on_idle": (), "is_fully_idle": (), "run_event_loop": ()},
    WEIGHT_UPDATER: {
        "release_memory_occupation": ("recv_req",),
        "resume_memory_occupation": ("recv_req",),
    },
    "sglang.srt.model_executor.model_runner:ModelRunner": {
        "forward": ("forward_batch",), "_maybe_execute_deferred_mamba_cow_and_clear": ("forward_batch",),
    },
    "sglang.srt.mem_cache.memory_pool:MambaPool": {
        "clear_slots": ("indices",), "copy_from": ("src_indices", "dst_indices"),
        "load_cpu_copy": ("mamba_cache_cpu", "indices"),
    },
    "sglang.srt.mem_cache.allocator.token:TokenToKVPoolAllocator": {"free": ("free_index",), "clear": ()},
    "sglang.srt.mem_cache.allocator.base:BaseTokenToKVPoolAllocator": {
        "get_cpu_copy": ("indices",), "load_cpu_copy": ("kv_cache_cpu", "indices"),
    },
    f"{_DISAGGREGATION}prefill:SchedulerDisaggregationPrefillMixin": {"send_kv_chunk": ("req", "last_chunk")},
    f"{_DISAGGREGATION}decode:DecodeTransferQueue": {"_commit_transfer_to_req": ("decode_req",)},
    f"{_DISAGGREGATION}decode:DecodePreallocQueue": {"_pre_alloc": ("req",)},
    f"{_DISAGGREGATION}decode:SchedulerDisaggregationDecodeMixin": {
        "get_new_prebuilt_batch": ("running_batch",),
    },
}  # fmt: skip
# Those that one version has, and another has not.
OWN_HOOKS: dict[str, dict[str, dict[str, tuple[str, ...]]]] = {
    "0.5.16": {
        _PAGED: {"free": ("free_index",), "clear": ()},
        "sglang.srt.mem_cache.radix_cache:RadixCache": {"evictable_size": (), "protected_size": ()},
        "sglang.srt.mem_cache.unified_radix_cache:UnifiedRadixCache": {
            "full_evictable_size": (), "full_protected_size": (), "swa_evictable_size": (),
            "swa_protected_size": (), "mamba_evictable_size": (), "mamba_protected_size": (),
        },
    },
    "0.5.23": {
        _PAGED: {"_release_page_ids": ("page_ids",), "clear": (), "get_all_free_pages": ()},
        "sglang.srt.mem_cache.unified_radix_cache:UnifiedRadixCache": {
            "full_evictable_size": (), "full_protected_size": (), "mamba_evictable_size": (),
            "mamba_protected_size": (), "all_mamba_values_flatten": (),
        },
        "sglang.srt.mem_cache.memory_pool:MHATokenToKVPool": {"move_kv_cache": ("tgt_loc", "src_loc")},
        "sglang.srt.mem_cache.allocator.unified_sub_pool:MultiEndedAllocator": {
            "free": ("free_index",), "clear": (),
        },
        f"{_UNIFIED}MHATokenToKVPool": _MOVE,
        f"{_UNIFIED}MLATokenToKVPool": _MOVE,
        f"{_UNIFIED}MambaPool": _MOVE,
        "sglang.srt.speculative.base_spec_worker:BaseSpecWorker": {"_draft_model_runners": ()},
    },
}  # fmt: skip


def check_version(version: str) -> None:
    """Raises UnsupportedEngine for a version that was not tested."""
    if release(version) not in VERSIONS:
        raise UnsupportedEngine(
            f"SGLang {version}: supported are {', '.join(VERSIONS)}; use a supported SGLang or a newer "
            "canary_obs"
        )


def check_device(version: str, device: str) -> None:
    """Raises UnsupportedEngine for a device that this version was not tested on."""
    if device != (tested := DEVICES[release(version)]):
        raise UnsupportedEngine(
            f"SGLang {version} on {device} is not covered yet: it was tested on {tested}; covered are "
            + " and ".join(f"{known} on {where}" for known, where in DEVICES.items())
            + ". Use one of them, or run without the canary"
        )


def check_hooks(version: str) -> None:
    """Raises UnsupportedEngine when a method is missing or has other parameters."""
    check_methods("SGLang", HOOKS | OWN_HOOKS[release(version)])


def release(version: str) -> str:
    """The version without the marks of a build."""
    return version.partition("+")[0].partition(".post")[0]


def installed_version() -> str:
    """The installed SGLang's version."""
    import sglang

    return str(sglang.__version__)
