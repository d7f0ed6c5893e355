"""SGLang's pools of DeepSeek-V4: window rows of all layers, and compressed entries and index keys of some.

A compressed entry stands for a run of 4 or 128 tokens, and lies at the slot of its last one, divided by that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from canary_kernels.buffers import KVSource
from canary_obs.engines.sglang.index_keys import index_pages, write_key
from canary_obs.engines.sglang.left_out import LeftOut, bytes_of
from canary_obs.errors import UnsupportedEngine
from canary_obs.kv_locations.split_pages import SplitPages

POOL = "DeepSeekV4TokenToKVPool"
# As messages name them.
WINDOWS, STATES = "rows of sliding windows", "states of compression"
UNIFIED = "rows of windows and compressed entries"
ENTRIES, KEYS = "compressed entries of {} tokens", "index keys of {} tokens"
_DATA_BYTES, _SCALE_BYTES = 576, 8  # of a row: 448 fp8 and 64 bfloat16 elements, 7 scales and a pad byte
_RATIOS = (4, 128)


def is_deepseek_v4(pool: Any) -> bool:
    """Whether it is such a pool of pools."""
    return type(pool).__name__ == POOL


def window_sources(pool: Any) -> tuple[KVSource, ...]:
    """Rows of the sliding window, of every layer. Raises UnsupportedEngine for a layout."""
    if pool.request_window is not None or pool.swa_req_ring_size is not None:
        raise UnsupportedEngine("they lie in a ring of each request, which is not covered yet")
    return _row_sources(pool.swa_kv_pool, _numbers(pool, None))


def entry_sources(pool: Any, ratio: int) -> tuple[KVSource, ...]:
    """Compressed entries of one ratio. Raises UnsupportedEngine for a layout."""
    if ratio not in _RATIOS:
        raise UnsupportedEngine("layers share them, which is not covered yet")
    if pool.kv_pools[ratio] is None:
        raise UnsupportedEngine("they lie behind the window's rows, which is not covered yet")
    return _row_sources(pool.kv_pools[ratio], _numbers(pool, ratio))


def key_sources(pool: Any, ratio: int) -> tuple[KVSource, ...]:
    """Index keys of one ratio. Raises UnsupportedEngine for a layout."""
    keys, found = pool.index_pools[ratio], list[KVSource]()
    if ratio not in _RATIOS:
        raise UnsupportedEngine("layers share them, which is not covered yet")
    if keys.use_fp4_indexer:
        raise UnsupportedEngine("they are of 4 bits, which is not covered yet")
    for index, layer in enumerate(_numbers(pool, ratio)):
        pages: Tensor = keys.index_k_with_scale_buffer[index]
        write = partial(write_key, keys, keys.start_layer + index)
        found += index_pages(pages, int(keys.page_size), layer, write)
    return tuple(found)


def layers_with_entries(pool: Any) -> dict[int, int]:
    """Ratio -> layers of this stage, of all ratios that it has."""
    ratios = stage_ratios(pool)
    return {ratio: ratios.count(ratio) for ratio in sorted(set(ratios) - {0})}


def pools_of_pools(pool: Any) -> dict[str, list[Tensor]]:
    """What lies where, by its name in messages: every tensor once."""
    found = {WINDOWS: _tensors(pool.swa_kv_pool)}
    if pool.request_window is not None:
        found[WINDOWS] = _tensors(pool.request_window.state)
    if pool.unified_kv_pool is not None:
        found[UNIFIED] = _tensors(pool.unified_kv_pool)
    for ratio, entries in pool.kv_pools.items():
        found[ENTRIES.format(ratio)] = _tensors(entries)
    for ratio, keys in pool.index_pools.items():
        found[KEYS.format(ratio)] = list(keys.contiguous_page_row_buffers())
    states = [*pool.compress_state_pools, *pool.indexer_compress_state_pools]
    found[STATES] = [state.kv_score_buffer.kv_score for state in states if state is not None]
    return {name: tensors for name, tensors in found.items() if tensors}


def held_bytes(pool: Any) -> int:
    """Of all its tensors."""
    return sum(bytes_of(tensors) for tensors in pools_of_pools(pool).values())


def left_out(pool: Any, refused: dict[str, str]) -> tuple[LeftOut, ...]:
    """What no group shows. `refused`: the reason for each that a group was to show."""
    if pool.unified_kv_pool is not None:
        refused[UNIFIED] = "they lie in one ring and its pages, which is not covered yet"
    reasons = refused | {STATES: "each forward overwrites them, so that nothing stays that could be compared"}
    return tuple(
        LeftOut(what=what, bytes=bytes_of(tensors), reason=reasons[what])
        for what, tensors in pools_of_pools(pool).items()
        if what in reasons
    )


def _row_sources(rows: Any, layers: Sequence[int]) -> tuple[KVSource, ...]:
    write, data, scales = _written(rows)
    found: list[KVSource] = []
    for index, layer in enumerate(layers):
        buffer: Tensor = rows.kv_buffer[index]
        split = SplitPages(
            name=f"the rows of layer {layer}", pages=buffer.view(torch.uint8), page_size=int(rows.page_size),
            data_bytes=data, scale_bytes=scales, padding=1,
        )  # fmt: skip
        found += split.sources(layer, partial(write, index))
    return tuple(found)


def _written(rows: Any) -> tuple[Callable[[int, int], None], int, int]:
    """A write of some row, by layer of the pool and slot; bytes of its elements, and of its scales."""
    kind, layout = type(rows).__name__, str(getattr(rows.kv_layout, "value", rows.kv_layout))
    if (kind, layout) != ("DeepSeekV4SingleKVPool", "v4"):
        raise UnsupportedEngine(f"they lie in {kind} with layout {layout!r}, which is not covered yet")
    from sglang.srt.mem_cache.deepseek_v4_memory_pool import NopeFp8RopeBf16Pack

    def write(index: int, slot: int) -> None:
        device = rows.kv_buffer[index].device
        row = NopeFp8RopeBf16Pack(
            k_nope_fp8=torch.linspace(-300, 400, 448, device=device)[None].to(torch.float8_e4m3fn),
            k_rope_bf16=torch.linspace(-3, 5, 64, device=device)[None].to(torch.bfloat16),
            scale_k_nope_ue8m0=torch.full((1, 7), 9, dtype=torch.uint8, device=device),
        )
        rows.set_key_buffer(index, torch.tensor([slot], device=device), row)

    return write, _DATA_BYTES, _SCALE_BYTES


def stage_ratios(pool: Any) -> list[int]:
    """Tokens of a compressed entry in each layer of this stage; 0 = it has none."""
    return list(pool.compression_ratios[pool._stage_start : pool._stage_end])


def _numbers(pool: Any, ratio: int | None) -> list[int]:
    """Numbers, in the model, of this stage's layers with that ratio; None = of all."""
    stage = enumerate(stage_ratios(pool), pool._stage_start)
    return [number for number, own in stage if ratio is None or own == ratio]


def _tensors(pool: Any) -> list[Tensor]:
    if pool is None:
        return []
    return [*pool.kv_buffer, *(getattr(pool, "kv_buffer_rope", None) or ())]
