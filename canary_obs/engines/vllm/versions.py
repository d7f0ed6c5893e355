"""The supported vLLM versions, and the methods that must exist there; checked before anything is changed."""

from __future__ import annotations

from typing import Any

from canary_obs.engines.toolkit.engine_methods import check_methods
from canary_obs.errors import UnsupportedEngine

# Tested with tests/engines/vllm/real: 0.26 on an H200, 0.33 on an H100, the others on a CPU. There, with and
# without a canary, the V2 model runner needs Triton up to 0.28 and fails in 0.29, and latent attention fails
# in 0.27 and 0.28.
V1_VERSIONS = ("0.26", "0.27", "0.28", "0.29", "0.30", "0.31", "0.32", "0.33")
V2_VERSIONS = ("0.26", "0.30", "0.31", "0.32", "0.33")

WORKER = "vllm.v1.worker.worker_base:WorkerWrapperBase"

# Methods that are wrapped or called: module:class -> method -> its first parameters after self.
HOOKS: dict[str, dict[str, tuple[str, ...]]] = {
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
    "vllm.v1.core.block_pool:BlockHashToBlockMap": {"insert": ("key", "block"), "pop": ("key", "block_id")},
    "vllm.v1.core.kv_cache_manager:KVCacheManager": {"get_block_ids": ("request_id",)},
    "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator": {
        "allocate_new_computed_blocks": (
            "request_id", "new_computed_blocks", "num_local_computed_tokens", "num_external_computed_tokens",
        ),
    },
    WORKER: {"initialize_from_config": ("kv_cache_configs",)},
}  # fmt: skip

# Methods that adapters wrap on instances of the model runners, read by tools/newest_vllm.py. Whether they are
# called is seen in a rehearsal.
RUNNER_HOOKS: dict[str, dict[str, tuple[str, ...]]] = {
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner": {
        "_model_forward": ("input_ids", "positions"),
        "_dummy_run": (),
        "execute_model": ("scheduler_output",),
        "sample_tokens": (),
    },
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner": {
        "prepare_attn": ("input_batch",),
        "execute_model": ("scheduler_output",),
        "sample_tokens": (),
    },
    "vllm.v1.worker.gpu.model_states.default:DefaultModelState": {"prepare_attn": ("input_batch",)},
}

# What is read of the scheduler's data: module:class -> names. A version without one of them would be found
# out by the first request. tests/engines/vllm/scheduler_fields.json has what versions have.
FIELDS: dict[str, frozenset[str]] = {
    "vllm.v1.core.sched.output:NewRequestData": frozenset(
        {
            "req_id", "prompt_token_ids", "prefill_token_ids", "prompt_embeds", "block_ids",
            "num_computed_tokens",
        }
    ),
    "vllm.v1.core.sched.output:CachedRequestData": frozenset(
        {"req_ids", "resumed_req_ids", "new_block_ids", "num_computed_tokens", "num_output_tokens"}
    ),
    "vllm.v1.core.sched.output:SchedulerOutput": frozenset(
        {
            "scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens",
            "total_num_scheduled_tokens", "scheduled_spec_decode_tokens", "finished_req_ids",
            "preempted_req_ids", "kv_connector_metadata", "new_block_ids_to_zero", "kv_cache_block_copies",
        }
    ),
}  # fmt: skip


def check_version(version: str, supported: tuple[str, ...] = V1_VERSIONS) -> str | None:
    """Raises UnsupportedEngine for a version that was not tested, unless it is newer than all that were.

    Returns what is to be said of a newer one, which may be tried; None = it was tested.
    """
    release = ".".join(version.split(".")[:2])
    if release in supported:
        return None
    runner = " with its V2 model runner" if release in V1_VERSIONS else ""
    if not runner and _number(release) > _number(supported[-1]):
        return f"vLLM {version} is newer than the versions that were tested, {', '.join(supported)}"
    other = ", VLLM_USE_V2_MODEL_RUNNER=0" if runner else ""
    raise UnsupportedEngine(
        f"vLLM {version}{runner}: supported are {', '.join(supported)}; "
        f"use a supported vLLM{other} or a newer canary_obs"
    )


def _number(release: str) -> tuple[int, ...]:
    """(0, 33) of "0.33"; () of what is none, which is less than all of them."""
    parts = release.split(".")
    return tuple(map(int, parts)) if all(part.isdecimal() for part in parts) else ()


def check_hooks() -> None:
    """Raises UnsupportedEngine when a method is missing or has other parameters."""
    check_methods("vLLM", HOOKS)


def check_not_wrapped(runner: Any) -> None:
    """Raises UnsupportedEngine when something has wrapped the runner's steps already."""
    # First of all: detecting the layout writes into the KV, which a canary that is attached would report.
    if "execute_model" in vars(runner):
        raise UnsupportedEngine(
            "this model runner is wrapped already, by another canary (KV_CANARY_MODE makes the vLLM plugin "
            "attach one) or another tool; detach that first"
        )
