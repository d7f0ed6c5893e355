"""The supported SGLang versions, and the methods that must exist there; checked before anything changes."""

from __future__ import annotations

from canary_obs.engines.toolkit.engine_methods import check_methods
from canary_obs.errors import UnsupportedEngine

# Tested with tests/engines/sglang/real, on a CPU.
VERSIONS = ("0.5.23",)

SCHEDULER = "sglang.srt.managers.scheduler:Scheduler"
WEIGHT_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater:SchedulerWeightUpdaterManager"

# Methods that are wrapped or called: module:class -> method -> its first parameters after self.
HOOKS: dict[str, dict[str, tuple[str, ...]]] = {
    SCHEDULER: {"run_batch": ("batch",), "on_idle": (), "is_fully_idle": (), "run_event_loop": ()},
    WEIGHT_UPDATER: {
        "release_memory_occupation": ("recv_req",),
        "resume_memory_occupation": ("recv_req",),
    },
    "sglang.srt.model_executor.model_runner:ModelRunner": {"forward": ("forward_batch",)},
    "sglang.srt.mem_cache.allocator.token:TokenToKVPoolAllocator": {"free": ("free_index",), "clear": ()},
    "sglang.srt.mem_cache.allocator.paged:PagedTokenToKVPoolAllocator": {
        "_release_page_ids": ("page_ids",), "clear": (), "get_all_free_pages": (),
    },
    "sglang.srt.mem_cache.unified_radix_cache:UnifiedRadixCache": {
        "full_evictable_size": (), "full_protected_size": (),
    },
}  # fmt: skip


def check_version(version: str) -> None:
    """Raises UnsupportedEngine for a version that was not tested."""
    if version.partition("+")[0].partition(".post")[0] not in VERSIONS:
        raise UnsupportedEngine(
            f"SGLang {version}: supported are {', '.join(VERSIONS)}; use a supported SGLang or a newer "
            "canary_obs"
        )


def check_hooks() -> None:
    """Raises UnsupportedEngine when a method is missing or has other parameters."""
    check_methods("SGLang", HOOKS)


def installed_version() -> str:
    """The installed SGLang's version."""
    import sglang

    return str(sglang.__version__)
