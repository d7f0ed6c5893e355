"""What vLLM allocated for KV and which layers its model has, apart from how the adapter finds their bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from canary_obs.engine_api.views import KVAllocation
from canary_obs.engines.vllm.compressors import keeps_compressor_states
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
    attended = [group for group in groups if group.of_tokens and not group.draft]
    apart = keeps_index_keys, keeps_compressor_states  # of layers that are counted elsewhere
    target = tuple(
        group.view.name for group in attended if not any(each(runner, group.layers[0]) for each in apart)
    )
    drafted = tuple(group.view.name for group in groups if group.draft)
    held = int(runner.model_config.get_num_layers_by_block_type(parallel, "attention"))
    found = {target: held - len(sharing_layers(runner))}
    names, ratios = {group.view.name for group in groups}, _ratios(runner)
    for ratio in {*ratios} - {0, 1}:
        compressed = {(f"c{ratio}",), (f"c{ratio}_state",)}
        found |= {own: ratios.count(ratio) for own in compressed if names.issuperset(own)}
    draft = getattr(speculation, "draft_model_config", None)
    if drafted and draft is not None:
        own = getattr(speculation, "draft_parallel_config", None) or parallel
        found[drafted] = int(draft.get_num_layers(own))
    return found


def _ratios(runner: Any) -> list[int]:
    """Tokens per compressed entry of each layer of this stage, by the model's configuration."""
    ratios = getattr(runner.model_config.hf_config, "compress_ratios", None)
    if not ratios:
        return []
    start, end = runner.model_config.get_layers_start_end_indices(runner.vllm_config.parallel_config)
    return [int(ratio) for ratio in ratios[start:end]]
