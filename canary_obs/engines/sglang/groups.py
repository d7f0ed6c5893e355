"""SGLang's KV pools as GroupViews: slots, windows, layers, and the location of their bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from canary_kernels.buffers import KVSource
from canary_kernels.layout import Part
from canary_obs.copy_records.draft_trees import SlotMap, own_slots
from canary_obs.engine_api.views import GroupView
from canary_obs.engines.sglang import deepseek_v4
from canary_obs.engines.sglang.deepseek_v4 import is_deepseek_v4
from canary_obs.engines.sglang.index_keys import INDEXER, has_index_keys, index_layers, index_view
from canary_obs.engines.sglang.left_out import LeftOut, bytes_of
from canary_obs.engines.sglang.physical_slots import PhysicalSlots, is_unified, physical_loc
from canary_obs.engines.sglang.states import STATE, state_view
from canary_obs.engines.sglang.window_slots import WindowSlots
from canary_obs.errors import UnsupportedEngine
from canary_obs.kv_locations.placement import LayerWrite, Placement, find_placements

FULL, SWA, DRAFT = "full", "swa", "draft"
_PROBED = 3  # slots that a probe writes to


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangGroup:
    """One group with what SGLang keeps for it."""

    view: GroupView
    allocator: Any  # of the group's own slots
    # By the slot in the request table, or of a state by its number there; 0 = none. None = they are the same.
    own_slots: SlotMap | None = None
    ratio: int = 1  # tokens of a slot; slot n is of those whose slots in the table are n * ratio and on
    # Of states, one per request: by the row in the request table, int32. None = tokens have slots.
    by_row: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundGroups:
    """All KV memory of a model runner."""

    covered: tuple[SglangGroup, ...]
    left_out: tuple[LeftOut, ...] = ()


def find_groups(runner: Any, head: int = 0, rank: int = 0) -> FoundGroups:
    """The groups of a model runner that `check_scheduler` takes. Raises UnsupportedEngine for a layout.

    `head`: the number, in the model, of the first KV head held here. `rank`: of the tensor ranks. Writes to
    the first slots and restores them; no forward may run meanwhile.
    """
    pool, allocator = runner.token_to_kv_pool, runner.token_to_kv_pool_allocator
    if is_deepseek_v4(pool):
        return _compressed(runner)
    if has_states(pool):
        return _with_states(runner, head, rank)
    if has_windows(pool):
        return FoundGroups(covered=_windowed(runner, head))
    layers = range(pool.start_layer, pool.start_layer + pool.layer_num)
    full = SglangGroup(view=_view(runner, FULL, pool, layers, head), allocator=allocator)
    if not has_index_keys(pool):
        return FoundGroups(covered=(full,))
    try:
        keys = index_view(pool, full.view.num_slots)
    except Exception as error:  # noqa: BLE001 - another build's layout may fail in any way
        reason = _reason(error)
        size = bytes_of(pool.index_k_with_scale_buffer)
        what = f"keys of {len(index_layers(pool))} indexers"
        return FoundGroups(covered=(full,), left_out=(LeftOut(what=what, bytes=size, reason=reason),))
    return FoundGroups(covered=(full, SglangGroup(view=keys, allocator=allocator)))


def _compressed(runner: Any) -> FoundGroups:
    """Every sub-pool of DeepSeek-V4. The table's own slots have no bytes, these lie in the sub-pools."""
    pool, allocator = runner.token_to_kv_pool, runner.token_to_kv_pool_allocator
    full = getattr(allocator, "full_attn_allocator", allocator)
    slots = int(full.size) + int(full.page_size)
    view = GroupView(name=FULL, num_slots=slots, page_size=1, sources=())
    found, refused = [SglangGroup(view=view, allocator=full)], dict[str, str]()

    def add(name: str, what: str, make: Callable[[], tuple[KVSource, ...]], ratio: int = 1) -> None:
        try:
            own = GroupView(name=name, num_slots=slots // ratio, page_size=1, sources=make())
        except Exception as error:  # noqa: BLE001 - another build's layout may fail in any way
            refused[what] = _reason(error)
            return
        if name != SWA:
            found.append(SglangGroup(view=own, allocator=full, ratio=ratio))
            return
        windows = allocator.swa_attn_allocator
        held = int(windows.size) + int(windows.page_size)
        own = replace(own, num_slots=held, window=int(runner.sliding_window_size) + 1)
        own_slots = WindowSlots(allocator.full_to_swa_index_mapping)
        found.append(SglangGroup(view=own, allocator=windows, own_slots=own_slots))

    add(SWA, deepseek_v4.WINDOWS, partial(deepseek_v4.window_sources, pool))
    for ratio in deepseek_v4.layers_with_entries(pool):
        entries, keys = partial(deepseek_v4.entry_sources, pool), partial(deepseek_v4.key_sources, pool)
        add(f"c{ratio}", deepseek_v4.ENTRIES.format(ratio), partial(entries, ratio), ratio)
        if ratio in pool.index_pools:
            add(f"c{ratio}_{INDEXER}", deepseek_v4.KEYS.format(ratio), partial(keys, ratio), ratio)
    return FoundGroups(covered=tuple(found), left_out=deepseek_v4.left_out(pool, refused))


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, UnsupportedEngine) else f"{type(error).__name__}: {error}"


def _with_states(runner: Any, head: int, rank: int) -> FoundGroups:
    """Full layers of a model that has layers of linear attention as well, and these layers' states."""
    pool, requests = runner.token_to_kv_pool, runner.req_to_token_pool
    numbers: dict[int, int] = pool.full_attention_layer_id_mapping
    full = sorted(numbers, key=lambda layer: numbers[layer])
    view = _view(runner, FULL, pool.full_kv_pool, full, head)
    allocator, of_states = runner.token_to_kv_pool_allocator, requests.mamba_allocator
    own, own_states = None, None
    if unified := is_unified(pool.full_kv_pool):
        allocator, of_states = allocator.full_attn_allocator, allocator.mamba_allocator
        own = PhysicalSlots(allocator)
    found = [SglangGroup(view=view, allocator=allocator, own_slots=own)]
    try:
        states = state_view(requests, rank)
    except Exception as error:  # noqa: BLE001 - another build's layout may fail in any way
        held = int(runner.layer_info.end_layer) - int(runner.layer_info.start_layer)
        left_out = LeftOut(
            what=f"states of {held - len(full)} layers of linear attention",
            bytes=int(pool.mamba_pool.mamba_cache.mem_usage_bytes()),
            reason=_reason(error),
        )
        return FoundGroups(covered=tuple(found), left_out=(left_out,))
    if unified:
        own_states = PhysicalSlots(of_states)
    by_row = requests.req_index_to_mamba_index_mapping
    found.append(SglangGroup(view=states, allocator=of_states, own_slots=own_states, by_row=by_row))
    return FoundGroups(covered=tuple(found))


def _windowed(runner: Any, head: int) -> tuple[SglangGroup, ...]:
    pool, allocator = runner.token_to_kv_pool, runner.token_to_kv_pool_allocator
    numbered = sorted((index, layer, windowed) for layer, (index, windowed) in pool.layers_mapping.items())
    full, windows = ([layer for _, layer, own in numbered if own is windowed] for windowed in (False, True))
    # SGLang's number leaves out the token itself.
    window = int(runner.sliding_window_size) + 1
    own: tuple[SlotMap | None, SlotMap]
    if is_unified(pool):
        own = PhysicalSlots(allocator.full_attn_allocator), PhysicalSlots(allocator.swa_attn_allocator)
    else:
        own = None, WindowSlots(allocator.full_to_swa_index_mapping)
    return (
        SglangGroup(
            view=_view(runner, FULL, pool.full_kv_pool, full, head),
            allocator=allocator.full_attn_allocator,
            own_slots=own[0],
        ),
        SglangGroup(
            view=_view(runner, SWA, pool.swa_kv_pool, windows, head, window),
            allocator=allocator.swa_attn_allocator,
            own_slots=own[1],
        ),
    )


def draft_name(runner: Any) -> str:
    """The group of a draft model's layers; of several models each has a number."""
    number = getattr(runner, "draft_model_idx", None)
    return DRAFT if number is None else f"{DRAFT}_{number}"


def draft_group(runner: Any, head: int = 0) -> SglangGroup:
    """The group of a draft model's layers, under the slot numbers of the target's request table or windows.

    Writes to the first slots and restores them. Raises UnsupportedEngine for a layout.
    """
    pool, allocator, name = runner.token_to_kv_pool, runner.token_to_kv_pool_allocator, draft_name(runner)
    if has_windows(pool):  # in all its layers
        window = int(runner.sliding_window_size) + 1
        return SglangGroup(
            view=_view(runner, name, pool.swa_kv_pool, sorted(pool.layers_mapping), head, window),
            allocator=allocator.swa_attn_allocator,
            own_slots=WindowSlots(allocator.full_to_swa_index_mapping),
        )
    layers = range(pool.start_layer, pool.start_layer + pool.layer_num)
    # With sliding windows in the target the table's slots are those of the full pool.
    return SglangGroup(
        view=_view(runner, name, pool, layers, head),
        allocator=getattr(allocator, "full_attn_allocator", allocator),
    )


def slots_of(group: SglangGroup, row: Tensor, first: int = 0) -> Tensor:
    """A group's slots of the tokens from position `first` on, int64; -1 = none.

    `row`: their slots in the request table, int64 [n]. Slots of several tokens are those of whole runs.
    """
    if group.ratio > 1:
        return row[(-first - 1) % group.ratio :: group.ratio] // group.ratio
    return own_slots(group.own_slots, row)


def pools_by_group(runner: Any, drafts: Sequence[Any] = ()) -> dict[str, Any]:
    """The pool that holds each group's KV. `drafts`: model runners of the draft group, at most one."""
    pool = runner.token_to_kv_pool
    found = {DRAFT: drafts[0].token_to_kv_pool} if drafts else {}
    if has_windows(pool):
        return found | {FULL: pool.full_kv_pool, SWA: pool.swa_kv_pool}
    if has_states(pool):
        return found | {FULL: pool.full_kv_pool, STATE: pool.mamba_pool}
    return found | {FULL: pool}


def has_states(pool: Any) -> bool:
    """Whether the model has layers of linear attention, which keep a state for each request."""
    return hasattr(pool, "mamba_pool")


def has_windows(pool: Any) -> bool:
    """Whether layers with a sliding window have a pool of their own."""
    return hasattr(pool, "swa_kv_pool")


def _view(
    runner: Any, name: str, pool: Any, layers: Sequence[int], head: int, window: int | None = None
) -> GroupView:
    """`layers`: numbers in the model of the pool's layers, in their order."""
    head = 0 if _is_latent(pool) else head  # every rank holds the whole vector
    layout, known = getattr(pool, "kv_cache_layout", "nhd"), "page_major" if is_unified(pool) else "nhd"
    if layout != known or getattr(pool, "is_quantized_kv_cache", False):
        raise UnsupportedEngine(
            f"SGLang's KV cache layout {layout!r} with quantisation "
            f"{getattr(pool, 'is_quantized_kv_cache', False)} is not covered yet; "
            "use the default layout and a KV cache of a plain number type"
        )
    sources: list[KVSource] = []
    likely: dict[Part, tuple[Placement, ...]] = {}  # the layer before: nearly always the same for the next
    for index, layer in enumerate(layers):
        for part, cache, others in _parts(pool, index):
            written = _layer_write(pool, index, part, cache, others, runner.dtype)
            saved = [(other, other[:_PROBED].clone()) for other in others]
            try:
                likely[part] = find_placements(written, likely.get(part, ()))
            finally:
                for other, content in saved:
                    other[:_PROBED] = content
            sources += [place.source(cache, layer, head) for place in likely[part]]
    num_slots = (pool.kv_buffer if _is_latent(pool) else pool.k_buffer)[0].shape[0]
    # The request table holds slots, also where the allocator hands out whole pages.
    return GroupView(name=name, num_slots=num_slots, page_size=1, sources=tuple(sources), window=window)


def _is_latent(pool: Any) -> bool:
    """Whether the pool stores one latent vector per token instead of K and V (MLA)."""
    return hasattr(pool, "kv_lora_rank")


def _parts(pool: Any, index: int) -> Iterator[tuple[Part, Tensor, list[Tensor]]]:
    """Of each part of a layer: its tensor, and the others that a write changes as well."""
    if _is_latent(pool):
        yield Part.K, pool.kv_buffer[index], []
        return
    keys, values = pool.k_buffer[index], pool.v_buffer[index]
    yield Part.K, keys, [values]
    yield Part.V, values, [keys]


def _layer_write(
    pool: Any, index: int, part: Part, cache: Tensor, others: list[Tensor], dtype: torch.dtype
) -> LayerWrite:
    _, heads, elements = cache.shape
    layer = SimpleNamespace(layer_id=pool.start_layer + index)

    def through(parts: dict[Part, Tensor], slots: Tensor) -> None:
        given, places = parts[part], physical_loc(pool, slots)
        # The other part gets zeros, and what it held is put back afterwards.
        rest = [slots.new_zeros((slots.shape[0], *other.shape[1:]), dtype=dtype) for other in others]
        keys, values = (given, rest[0] if rest else given) if part is Part.K else (rest[0], given)
        pool.set_kv_buffer(layer, places, keys, values)

    return LayerWrite(
        name=f"layer {index}", cache=cache, page_size=1, shapes={part: (heads, elements)}, dtype=dtype,
        write=through,
    )  # fmt: skip
