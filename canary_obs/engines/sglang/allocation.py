"""What SGLang allocated for KV and states, and which layers its model has, apart from what groups show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from canary_obs.engine_api.views import KVAllocation
from canary_obs.engines.sglang.groups import SglangGroup, has_states


def kv_allocation(runner: Any, groups: Sequence[SglangGroup]) -> KVAllocation:
    """From the pool's own report of its size, and the layers that the model runner says it has."""
    pool = runner.token_to_kv_pool
    size = pool.get_kv_size_bytes()
    held = int(sum(size) if isinstance(size, tuple) else size)
    numbers = range(int(runner.layer_info.start_layer), int(runner.layer_info.end_layer))
    names = tuple(group.view.name for group in groups)
    if not has_states(pool):
        return KVAllocation(bytes=held, layers={names: len(numbers)})
    states = int(pool.mamba_pool.mamba_cache.mem_usage_bytes())
    full = set(runner.model_config.hf_text_config.full_attention_layer_ids).intersection(numbers)
    return KVAllocation(
        bytes=held + states,
        layers={names: len(full)},
        left_out=(
            f"states of {len(numbers) - len(full)} layers of linear attention are not checked "
            f"({states / (held + states):.1%} of KV bytes): each forward overwrites them, so that nothing "
            "stays that could be compared",
        ),
    )
