"""What SGLang allocated for KV and states, and which layers its model has, apart from what groups show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from canary_obs.engine_api.views import KVAllocation
from canary_obs.engines.sglang.groups import DRAFT, SglangGroup, has_states


def kv_allocation(runner: Any, groups: Sequence[SglangGroup], drafts: Sequence[Any] = ()) -> KVAllocation:
    """From the pools' own report of their size, and the layers that the model runners say they have.

    `drafts`: model runners of the draft group.
    """
    pool = runner.token_to_kv_pool
    held = _held(pool) + sum(_held(draft.token_to_kv_pool) for draft in drafts)
    numbers = range(int(runner.layer_info.start_layer), int(runner.layer_info.end_layer))
    names = tuple(group.view.name for group in groups if group.view.name != DRAFT)
    drafting = sum(int(draft.layer_info.num_effective_layers) for draft in drafts)
    own = {(DRAFT,): drafting} if drafts else {}
    if not has_states(pool):
        return KVAllocation(bytes=held, layers={names: len(numbers)} | own)
    states = int(pool.mamba_pool.mamba_cache.mem_usage_bytes())
    full = set(runner.model_config.hf_text_config.full_attention_layer_ids).intersection(numbers)
    return KVAllocation(
        bytes=held + states,
        layers={names: len(full)} | own,
        left_out=(
            f"states of {len(numbers) - len(full)} layers of linear attention are not checked "
            f"({states / (held + states):.1%} of KV bytes): each forward overwrites them, so that nothing "
            "stays that could be compared",
        ),
    )


def _held(pool: Any) -> int:
    size = pool.get_kv_size_bytes()
    return int(sum(size) if isinstance(size, tuple) else size)
