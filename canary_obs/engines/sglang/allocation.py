"""What SGLang allocated for KV and states, and which layers its model has, apart from what groups show."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

from canary_obs.engine_api.views import KVAllocation
from canary_obs.engines.sglang import deepseek_v4
from canary_obs.engines.sglang.deepseek_v4 import is_deepseek_v4
from canary_obs.engines.sglang.groups import SWA, FoundGroups, draft_name, has_states
from canary_obs.engines.sglang.index_keys import INDEXER, index_layers
from canary_obs.engines.sglang.physical_slots import pool_bytes
from canary_obs.engines.sglang.states import STATE


def kv_allocation(
    runner: Any, found: FoundGroups, drafts: Sequence[Any] = (), covered: Container[str] = ()
) -> KVAllocation:
    """From the pools' own report of their size, and the layers that the model runners say they have.

    `drafts`: model runners of the draft models; `covered`: groups, theirs among them if they are.
    """
    pool = runner.token_to_kv_pool
    if is_deepseek_v4(pool):
        return _compressed(pool, found)
    held = pool_bytes(pool) + sum(pool_bytes(draft.token_to_kv_pool) for draft in drafts)
    numbers = range(int(runner.layer_info.start_layer), int(runner.layer_info.end_layer))
    attended = set(numbers)
    if has_states(pool):
        held += int(pool.mamba_pool.mamba_cache.mem_usage_bytes())
        attended.intersection_update(runner.model_config.hf_text_config.full_attention_layer_ids)
    names = [group.view.name for group in found.covered]
    layers = {tuple(name for name in names if name not in (INDEXER, STATE)): len(attended)}
    if STATE in names:
        layers[STATE,] = len(numbers) - len(attended)
    if INDEXER in names:
        layers[INDEXER,] = len(index_layers(pool))
    for draft in drafts:
        if (name := draft_name(draft)) in covered:
            layers[name,] = int(draft.layer_info.num_effective_layers)
    return KVAllocation(
        bytes=held, layers=layers, left_out=tuple(part.described(held) for part in found.left_out)
    )


def _compressed(pool: Any, found: FoundGroups) -> KVAllocation:
    held = deepseek_v4.held_bytes(pool)
    layers: dict[tuple[str, ...], int] = {(SWA,): len(deepseek_v4.stage_ratios(pool))}
    layers |= {(f"c{ratio}",): count for ratio, count in deepseek_v4.layers_with_entries(pool).items()}
    names = {group.view.name for group in found.covered}
    return KVAllocation(
        bytes=held,
        # What a refused group would hold is named among what is left out.
        layers={own: count for own, count in layers.items() if names.issuperset(own)},
        left_out=tuple(part.described(held) for part in found.left_out),
    )
