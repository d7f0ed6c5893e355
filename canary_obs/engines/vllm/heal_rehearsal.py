"""Tries what healing does on a vLLM scheduler of its own, before it is done to real requests."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from canary_obs.engines.toolkit.engine_methods import check_methods
from canary_obs.errors import UnsupportedEngine

# Methods that healing calls or wraps: module:class -> method -> its first parameters after self.
HEAL_HOOKS: dict[str, dict[str, tuple[str, ...]]] = {
    "vllm.v1.core.sched.scheduler:Scheduler": {
        "update_from_output": ("scheduler_output", "model_runner_output"),
        "finish_requests": ("request_ids", "finished_status"),
        "_preempt_request": ("request", "timestamp", "drop_stale_output"),
        "_free_request": ("request",),
    },
    "vllm.v1.core.block_pool:BlockPool": {
        "evict_blocks": ("block_ids",),
        "touch": ("blocks",),
        "free_blocks": ("ordered_blocks",),
    },
}
RANK_HOOKS: dict[str, dict[str, tuple[str, ...]]] = {
    "vllm.v1.executor.multiproc_executor:MultiprocExecutor": {
        "collective_rpc": (
            "method", "timeout", "args", "kwargs", "non_block", "unique_reply_rank", "kv_output_aggregator",
        ),
    },
}  # fmt: skip
_TOKENS = 3


def rehearse_healing(scheduler: Any) -> str | None:
    """Why this vLLM allows no more than a dry run; None = every function acts as expected."""
    ranks = int(scheduler.parallel_config.world_size)
    if ranks > 1 and (problem := _unheard(scheduler.parallel_config)) is not None:
        return problem
    try:
        check_methods("vLLM", HEAL_HOOKS | (RANK_HOOKS if ranks > 1 else {}))
        found = _played(_small_scheduler(scheduler))
    except UnsupportedEngine as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - whatever differs in this version
        return f"the rehearsal of healing failed ({type(error).__name__}: {error})"
    return f"the rehearsal of healing did not agree: {found}" if found else None


def _unheard(config: Any) -> str | None:
    """Why what some ranks find cannot reach the scheduler; None = it can."""
    if config.world_size != config.tensor_parallel_size:
        return (
            f"vLLM gives its scheduler the results of the last stage of {config.world_size} ranks, and not "
            "what the others find"
        )
    if (sharding := getattr(config, "decode_context_parallel_size", 1)) > 1:
        return (
            f"decode_context_parallel_size={sharding} spreads the tokens of requests over ranks, and healing "
            "was not tried with that"
        )
    if config.distributed_executor_backend != "mp":
        return (
            f"vLLM gives its scheduler the results of one of {config.world_size} ranks with "
            f"distributed_executor_backend={config.distributed_executor_backend}; use mp"
        )
    return None


def _small_scheduler(scheduler: Any) -> Any:
    """One like it, without a connector, with few blocks."""
    config = copy.copy(scheduler.vllm_config)
    for name in ("kv_transfer_config", "ec_transfer_config", "kv_events_config", "speculative_config"):
        if getattr(config, name, None) is not None:
            object.__setattr__(config, name, None)
    manager = scheduler.kv_cache_manager
    blocks = max(64, 8 * len(scheduler.kv_cache_config.kv_cache_groups))
    return type(scheduler)(
        vllm_config=config,
        kv_cache_config=replace(scheduler.kv_cache_config, num_blocks=blocks),
        structured_output_manager=scheduler.structured_output_manager,
        block_size=scheduler.block_size,
        hash_block_size=manager.block_pool.hash_block_size,
    )


def _played(scheduler: Any) -> str | None:
    """What does not agree: one request is computed again, another is ended, a cached block is evicted."""
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import RequestStatus

    from canary_obs.engines.vllm.heal_actions import VllmActions

    actions, pool = VllmActions(scheduler), scheduler.kv_cache_manager.block_pool
    free = pool.get_num_free_blocks()
    again, ended = _request(scheduler, "again"), _request(scheduler, "ended")
    for request in (again, ended):
        scheduler.add_request(request)
    output = scheduler.schedule()
    cached = [block for key in again.block_hashes for block in actions.blocks_of(bytes(key))]
    actions.evict(cached)
    if any(actions.is_cached(bytes(key)) for key in again.block_hashes):
        return "an evicted block is still in the prefix cache"
    actions.recompute(again.request_id)
    actions.end(ended.request_id)
    names = list(output.num_scheduled_tokens)
    result = ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: index for index, name in enumerate(names)},
        sampled_token_ids=[[_TOKENS] for _ in names],
    )
    outputs = scheduler.update_from_output(output, result)
    actions.inform_clients(outputs)
    sent = [each for client in outputs.values() for each in client.outputs]
    if [each.request_id for each in sent] != [ended.request_id] or sent[0].new_token_ids:
        return "the results of a step were given out although they were dropped"
    if again.num_output_tokens or again.status != RequestStatus.PREEMPTED:
        return "a request that is to be computed again was not set back"
    block = pool.blocks[1]
    pool.touch([block])
    left = pool.get_num_free_blocks()
    pool.free_blocks([block])
    scheduler.finish_requests((again.request_id,), RequestStatus.FINISHED_ABORTED)
    if (left, pool.get_num_free_blocks()) != (free - 1, free):
        return f"{free} blocks were free, {left} with one in quarantine, then {pool.get_num_free_blocks()}"
    return None


def _request(scheduler: Any, name: str) -> Any:
    from vllm import SamplingParams
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.request import Request

    size = int(scheduler.kv_cache_manager.block_pool.hash_block_size)
    hasher = get_request_block_hasher(size, lambda value: repr(value).encode().ljust(32)[-32:])
    return Request(
        request_id=f"_kv_canary_{name}",
        prompt_token_ids=[_TOKENS] * (size + 1),
        sampling_params=SamplingParams(max_tokens=2, temperature=0),
        pooling_params=None,
        block_hasher=hasher,
    )
