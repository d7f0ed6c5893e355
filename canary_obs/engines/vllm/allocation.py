"""What vLLM allocated for KV and which layers its model has, apart from how the adapter finds their bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from canary_obs.engine_api.views import KVAllocation
from canary_obs.engines.vllm.groups import FoundGroups, VllmGroup
from canary_obs.engines.vllm.index_keys import keeps_index_keys
from canary_obs.engines.vllm.kv_bytes import configured_bytes, sharing_layers


def kv_allocation(runner: Any, groups: FoundGroups) -> KVAllocation:
    """From the runner's KV cache configuration and tensors, and from the model's own configuration."""
    total = max(configured_bytes(runner), _held_bytes(runner))
    return KVAllocation(
        bytes=total,
        layers=_layers(runner, groups.covered),
        left_out=tuple(group.described(total) for group in groups.left_out),
    )


def _held_bytes(runner: Any) -> int:
    """Of the tensors themselves, whatever the configuration says."""
    caches = [cache for cache in runner.kv_caches if isinstance(cache, torch.Tensor)]
    storages = {cache.untyped_storage().data_ptr(): cache.untyped_storage().nbytes() for cache in caches}
    return sum(storages.values())


def _layers(runner: Any, groups: Sequence[VllmGroup]) -> dict[tuple[str, ...], int]:
    parallel, speculation = runner.vllm_config.parallel_config, runner.speculative_config
    attended = [group for group in groups if not (group.draft or group.states)]
    target = tuple(g.view.name for g in attended if not keeps_index_keys(runner, g.layers[0]))
    drafted = tuple(group.view.name for group in groups if group.draft)
    held = int(runner.model_config.get_num_layers_by_block_type(parallel, "attention"))
    found = {target: held - len(sharing_layers(runner))}
    draft = getattr(speculation, "draft_model_config", None)
    if drafted and draft is not None:
        own = getattr(speculation, "draft_parallel_config", None) or parallel
        found[drafted] = int(draft.get_num_layers(own))
    return found
