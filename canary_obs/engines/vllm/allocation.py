"""What vLLM allocated for KV and which layers its model has, apart from how the adapter finds their bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from canary_obs.engine_api.views import KVAllocation
from canary_obs.engines.vllm.groups import VllmGroup


def kv_allocation(runner: Any, groups: Sequence[VllmGroup]) -> KVAllocation:
    """From the runner's KV cache configuration and tensors, and from the model's own configuration."""
    return KVAllocation(
        bytes=max(_configured_bytes(runner), _held_bytes(runner)), layers=_layers(runner, groups)
    )


def _configured_bytes(runner: Any) -> int:
    """Of every layer in every group: groups that lie over each other in memory count each."""
    config, total = runner.kv_cache_config, 0
    shared = _sharing_layers(runner)
    for group in config.kv_cache_groups:
        inner = getattr(group.kv_cache_spec, "kv_cache_specs", None)
        for name in set(group.layer_names) - shared:
            spec = inner[name] if inner else group.kv_cache_spec
            if type(spec).__name__ != "EncoderOnlyAttentionSpec":  # keeps no KV
                total += _page_bytes(spec) * int(config.num_blocks)
    return total


def _page_bytes(spec: Any) -> int:
    """Bytes of one block in one layer, without what pads it to the size of other layers' blocks."""
    for name in ("unpadded_page_size_bytes", "real_page_size_bytes", "page_size_bytes"):
        if (size := getattr(spec, name, None)) is not None:
            return int(size)
    raise AttributeError(f"{type(spec).__name__} has no size of a page")


def _held_bytes(runner: Any) -> int:
    """Of the tensors themselves, whatever the configuration says."""
    caches = [cache for cache in runner.kv_caches if isinstance(cache, torch.Tensor)]
    storages = {cache.untyped_storage().data_ptr(): cache.untyped_storage().nbytes() for cache in caches}
    return sum(storages.values())


def _sharing_layers(runner: Any) -> set[str]:
    """Layers that read another layer's KV and have none of their own."""
    layers = runner.compilation_config.static_forward_context
    target = "kv_sharing_target_layer_name"
    return {name for name, layer in layers.items() if getattr(layer, target, None) is not None}


def _layers(runner: Any, groups: Sequence[VllmGroup]) -> dict[tuple[str, ...], int]:
    parallel, speculation = runner.vllm_config.parallel_config, runner.speculative_config
    target = tuple(group.view.name for group in groups if not group.draft)
    drafted = tuple(group.view.name for group in groups if group.draft)
    held = int(runner.model_config.get_num_layers_by_block_type(parallel, "attention"))
    found = {target: held - len(_sharing_layers(runner))}
    draft = getattr(speculation, "draft_model_config", None)
    if drafted and draft is not None:
        own = getattr(speculation, "draft_parallel_config", None) or parallel
        found[drafted] = int(draft.get_num_layers(own))
    return found
