"""vLLM's KV cache groups as GroupViews: slots, window, layers, and the location of their bytes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from canary_kernels.buffers import WHOLE, KVSource, Sharding
from canary_obs.engine_api.views import GroupView
from canary_obs.engines.toolkit.state_sources import state_sources
from canary_obs.engines.vllm.compressed import (
    LayerKind,
    check_an_entry_is_a_token,
    checked_alike,
    entry_tokens,
    tokens_per_entry,
)
from canary_obs.engines.vllm.compressors import (
    compressed_by,
    entry_sources,
    is_of_indexer,
    keeps_compressed_keys,
    keeps_compressor_states,
)
from canary_obs.engines.vllm.context_parallel import (
    FindPacked,
    check_can_be_sharded,
    check_prompts_are_whole,
    sharding_of,
    unless_sharded,
)
from canary_obs.engines.vllm.drafters import draft_layers, drafter_is_known
from canary_obs.engines.vllm.index_keys import keeps_index_keys
from canary_obs.engines.vllm.kv_bytes import cache_bytes, configured_bytes
from canary_obs.engines.vllm.layer_writes import is_latent, layer_write
from canary_obs.engines.vllm.left_out import LeftOut, check_something_is_left
from canary_obs.engines.vllm.packed_windows import packed_sources
from canary_obs.engines.vllm.state_specs import keeps_states, tokens_per_state
from canary_obs.errors import UnsupportedEngine
from canary_obs.kv_locations.placement import Placement, find_placements

_FULL = frozenset({"FullAttentionSpec", "MLAAttentionSpec"})
_SLIDING = frozenset({"SlidingWindowSpec", "SlidingWindowMLASpec"})
# Kinds of specs whose groups are checked, or keep no KV; groups of all others are left out.
COVERED_SPECS = _FULL | _SLIDING | {"MambaSpec", "EncoderOnlyAttentionSpec"}
_LAYER_NUMBER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmGroup:
    """One group with vLLM's numbers for it."""

    number: int  # index in kv_cache_groups and in the block tables
    num_blocks: int
    block_size: int  # tokens per block of the scheduler; of all ranks, where they are spread over ranks
    view: GroupView
    layers: tuple[str, ...]  # vLLM's names
    draft: bool = False  # layers of a draft model, reported after drafting
    states: bool = False  # one slot per block, see states.py
    state_tokens: int | None = None  # after which a request's state moves to another block; None = never
    entry_tokens: int = 1  # tokens that each slot stands for, see entry_steps.py
    sharding: Sharding = WHOLE  # over the ranks of decode context parallelism, see sharded_slots.py

    @property
    def slot_tokens(self) -> int:
        """Tokens that a slot stands for; a block's, where that is a state."""
        return self.block_size if self.states else self.entry_tokens

    @property
    def block_slots(self) -> int:
        """Slots per block."""
        return self.block_size // self.slot_tokens

    @property
    def of_tokens(self) -> bool:
        """Whether each token of a request has a slot."""
        return not self.states and self.entry_tokens == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundGroups:
    """Every KV cache group of a model runner that keeps KV."""

    covered: tuple[VllmGroup, ...]
    left_out: tuple[LeftOut, ...]


def find_groups(runner: Any) -> FoundGroups:
    """The groups of an initialised model runner; one that cannot be checked is left out, with the reason.

    Raises UnsupportedEngine when none is left, or requests' slots cannot be followed in any of them.
    """
    check_prompts_are_whole(runner)
    drafts, known = draft_layers(runner), drafter_is_known(runner)
    found: list[VllmGroup] = []
    left_out: list[LeftOut] = []
    names: dict[str, int] = {}

    def add(number: int, layers: list[str], hidden: Iterable[str] = (), *, draft: bool = False) -> None:
        try:
            specs = _specs(runner, number, layers)
            if keeps_states(specs):
                base, own = "state", _state_group(runner, number, layers, tokens_per_state(specs))
            else:
                base, own, refused = _attention_group(runner, number, layers, hidden, draft=draft)
                if refused:
                    reason = next(iter(refused.values()))
                    left_out.append(_left_out(runner, number, list(refused), reason, len(layers)))
        except Exception as error:  # noqa: BLE001 - another backend's layout may fail in any way
            count = len(runner.kv_cache_config.kv_cache_groups[number].layer_names)
            part_of = count if count > len(layers) else 0
            left_out.append(_left_out(runner, number, layers, _text_of(error), part_of))
            return
        name = _next_name("draft" if draft else base, names)
        found.append(replace(own, draft=draft, view=replace(own.view, name=name)))

    for number, group in enumerate(runner.kv_cache_config.kv_cache_groups):
        layers = [name for name in group.layer_names if name not in drafts]
        specs = _specs(runner, number, layers)
        if layers and not all(type(spec).__name__ == "EncoderOnlyAttentionSpec" for spec in specs):
            hidden = () if known else drafts.intersection(group.layer_names)
            for own in checked_alike(layers, partial(_kind_of, runner, number)):
                add(number, own, hidden)
                hidden = ()
    for number, group in enumerate(runner.kv_cache_config.kv_cache_groups if known else ()):
        if layers := [name for name in group.layer_names if name in drafts]:
            add(number, layers, draft=True)
    check_something_is_left(len(found), left_out)
    return FoundGroups(covered=tuple(found), left_out=tuple(left_out))


def _left_out(runner: Any, number: int, layers: list[str], reason: str, part_of: int = 0) -> LeftOut:
    return LeftOut(
        number=number,
        layers=tuple(layers),
        bytes=configured_bytes(runner, number, layers),
        reason=reason,
        part_of=part_of,
    )


def _text_of(error: Exception) -> str:
    plain = isinstance(error, UnsupportedEngine)  # its message says it all
    return str(error) if plain else f"{type(error).__name__}: {error}"


def _next_name(base: str, names: dict[str, int]) -> str:
    names[base] = names.get(base, 0) + 1
    apart = "_" if base[-1].isdigit() else ""
    return base if names[base] == 1 else f"{base}{apart}{names[base]}"


def _kind_of(runner: Any, number: int, layer: str) -> LayerKind:
    entry = tokens_per_entry(_specs(runner, number, [layer])[0])
    if entry != 1:
        return LayerKind(entry, indexer=keeps_compressed_keys(runner, layer))
    if keeps_compressor_states(runner, layer):
        return LayerKind(0, compressing=True, indexer=is_of_indexer(layer))
    # The keys by which sparse attention chooses share a group with what it chooses from.
    return LayerKind(0, indexer=keeps_index_keys(runner, layer))


def _attention_group(
    runner: Any, number: int, layers: list[str], hidden: Iterable[str], *, draft: bool
) -> tuple[str, VllmGroup, dict[str, str]]:
    """Its name, and the reason for each layer that cannot be checked; raises it when there are no others."""
    specs, config = _specs(runner, number, layers), runner.kv_cache_config
    if draft:
        check_an_entry_is_a_token(specs)
    block_size = config.kv_cache_groups[number].kv_cache_spec.block_size
    table_size = kernel_block_size(runner, number)
    ratio = entry_tokens(runner, specs, block_size, table_size)
    base, window = _attention(specs)
    sharding = sharding_of(runner, number, specs)
    check_can_be_sharded(sharding, table_size, plain=ratio == 1 and window is None and not draft)
    held = config.num_blocks * block_size // ratio  # slots of this rank
    packed = unless_sharded(sharding, packed_sources if ratio == 1 else entry_sources)
    (sources, refused), num_slots = _sources(runner, layers, held, packed), held * sharding.ranks
    view = GroupView(
        name="",
        num_slots=num_slots,
        page_size=table_size * sharding.ranks // ratio,
        sources=[replace(source, sharding=sharding) for source in sources],
        window=window,
        uncovered_bytes=sum(cache_bytes(runner, layer) for layer in (*hidden, *refused)) // num_slots,
    )
    group = VllmGroup(
        number=number, num_blocks=config.num_blocks, block_size=block_size * sharding.ranks, view=view,
        layers=tuple(layers), entry_tokens=ratio, sharding=sharding,
    )  # fmt: skip
    return _base_name(runner, layers[0], base, ratio), group, refused


def _base_name(runner: Any, layer: str, base: str, ratio: int) -> str:
    apart = "_indexer" if is_of_indexer(layer) else ""
    if ratio > 1:
        return f"c{ratio}{apart}"
    if keeps_compressor_states(runner, layer):
        return f"c{compressed_by(runner, layer)}{apart}_state"
    return "indexer" if keeps_index_keys(runner, layer) else base


def _state_group(runner: Any, number: int, layers: list[str], tokens: int | None) -> VllmGroup:
    config, context = runner.kv_cache_config, runner.compilation_config.static_forward_context
    block_size = int(config.kv_cache_groups[number].kv_cache_spec.block_size)
    if tokens is not None and kernel_block_size(runner, number) != block_size:
        raise UnsupportedEngine(f"its block table counts in other blocks than those of {block_size} tokens")
    numbers, parallel = layer_numbers(layers), runner.vllm_config.parallel_config
    held = [(numbers[name], context[name].kv_cache) for name in layers]
    view = GroupView(
        name="",
        num_slots=config.num_blocks,
        page_size=1,
        sources=state_sources(held, int(parallel.rank) % int(parallel.tensor_parallel_size)),
    )
    return VllmGroup(
        number=number, num_blocks=config.num_blocks, block_size=block_size, view=view,
        layers=tuple(layers), states=True, state_tokens=tokens,
    )  # fmt: skip


def kernel_block_size(runner: Any, number: int) -> int:
    """Tokens per entry of the worker's block table; kernels may use smaller blocks than the scheduler."""
    if hasattr(runner, "block_tables"):
        tables = runner.block_tables
        # 0.26 has both sizes, later versions only the kernels'.
        return int(getattr(tables, "kernel_block_sizes", tables.block_sizes)[number])
    return int(runner.input_batch.block_table[number].block_size)


def _specs(runner: Any, number: int, layers: Iterable[str]) -> list[Any]:
    spec = runner.kv_cache_config.kv_cache_groups[number].kv_cache_spec
    inner = getattr(spec, "kv_cache_specs", None)
    return [inner[name] for name in layers if name in inner] if inner else [spec]


def _attention(specs: list[Any]) -> tuple[str, int | None]:
    types = {type(spec).__name__ for spec in specs}
    if types <= _FULL:
        return "full", None
    windows = {getattr(spec, "sliding_window", None) for spec in specs}
    if types <= _SLIDING and len(windows) == 1:
        return "swa", windows.pop()
    raise UnsupportedEngine(
        f"it holds {', '.join(sorted(types))} with windows {sorted(map(str, windows))}; "
        f"supported are {', '.join(sorted(_FULL | _SLIDING))}, one window per group"
    )


def _sources(
    runner: Any, names: list[str], num_slots: int, find_packed: FindPacked
) -> tuple[tuple[KVSource, ...], dict[str, str]]:
    layers = runner.compilation_config.static_forward_context
    numbers = layer_numbers(names)
    seen: set[int] = set()
    sources: list[KVSource] = []
    refused: dict[str, str] = {}
    placements: tuple[Placement, ...] = ()  # of the layer before: nearly always the same for the next one
    for name in names:
        layer = layers[name]
        cache = layer.kv_cache
        # A layer that shares another layer's cache has no bytes of its own.
        if cache.data_ptr() in seen:
            continue
        seen.add(cache.data_ptr())
        page_size = num_slots // cache.shape[0]
        try:
            if (packed := find_packed(runner, name, page_size, numbers[name])) is not None:
                sources += packed
                continue
            written = layer_write(name, layer, cache, page_size, runner.model_config.dtype)
            placements = find_placements(written, placements)
        except Exception as error:  # noqa: BLE001 - another backend's layout may fail in any way
            refused[name] = _text_of(error)
            continue
        start = _first_head(runner, layer)
        sources += [placement.source(cache, numbers[name], start) for placement in placements]
    if refused and not sources:
        raise UnsupportedEngine(next(iter(refused.values())))
    return tuple(sources), refused


def layer_numbers(names: list[str]) -> dict[str, int]:
    """The model's layer numbers, when each name contains another one; else the order of the names."""
    numbers = {name: int(hit[1]) for name in names if (hit := _LAYER_NUMBER.search(name))}
    if len(set(numbers.values())) == len(names):
        return numbers
    return {name: index for index, name in enumerate(names)}


def _first_head(runner: Any, layer: Any) -> int:
    parallel = runner.vllm_config.parallel_config
    size, heads = int(parallel.tensor_parallel_size), int(getattr(layer, "num_kv_heads", 1))
    if is_latent(layer) or size == 1:
        return 0
    rank, total = int(parallel.rank) % size, int(runner.model_config.get_total_num_kv_heads())
    return rank * heads if total >= size else rank * total // size
