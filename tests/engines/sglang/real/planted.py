"""Faults from outside the canary: what is changed in a running engine, and when."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from canary_obs.engines.sglang.request_rows import row_of
from canary_obs.vocabulary import Part
from tests.engines.sglang.real.rig import Rig
from tests.engines.sglang.real.traffic import prompts

DECODED = 6  # tokens of each request when a fault is planted
LATE = 11  # a position that each of them has then


def serve(rig: Rig, plant: Callable[[Rig], object], turns: int = 4) -> None:
    """Let requests decode, plant a fault between two turns of the loop, and let it turn on for a while."""

    def script() -> Iterator[Iterable[Any]]:
        yield [rig.request(name, prompt, 60) for name, prompt in prompts(3).items()]
        while len(rig.running(3, DECODED)) < 3:
            yield ()
        plant(rig)
        yield from [()] * turns

    rig.run(script())


def once(rig: Rig, change: Callable[[Rig, Any], None], *, after: bool = False) -> None:
    """Change the next batch that decodes, before the model runner is given it; or what it left behind."""
    given = rig.runner.forward

    def forward(batch: Any, *args: Any, **kwargs: Any) -> Any:
        rig.runner.forward = given
        if not after:
            change(rig, batch)
        result = given(batch, *args, **kwargs)
        if after:
            if rig.table.is_cuda:  # what the canaries read of it is read
                torch.cuda.synchronize()
            change(rig, batch)
        return result

    forward.waits = True  # type: ignore[attr-defined]
    rig.runner.forward = forward


def row(rig: Rig, place: int = 0) -> Any:
    """The table's row of a request that decodes."""
    return rig.table[row_of(rig.running(3, DECODED)[place])]


def full_pool(rig: Rig) -> Any:
    """The pool of the layers that see everything."""
    pool = rig.runner.token_to_kv_pool
    return getattr(pool, "full_kv_pool", pool)


def swap_entries(rig: Rig) -> None:
    """Two entries of one request change places."""
    entries = row(rig)
    entries[[5, 9]] = entries[[9, 5]]


def take_entry(rig: Rig) -> None:
    """A request reads a slot of another one, past the prefix that they share."""
    mine, other = rig.running(3, DECODED)[:2]
    last = len(mine.origin_input_ids) - 2
    rig.table[row_of(mine), last] = rig.table[row_of(other), len(other.origin_input_ids) - 2]


def drop_entry(rig: Rig) -> None:
    """An entry is lost: 0 is the slot that takes the writes of padded tokens."""
    row(rig)[5] = 0


def repeat_entry(rig: Rig) -> None:
    """A token is read twice, and the one after it not at all."""
    entries = row(rig)
    entries[9] = entries[8]


def shift_entries(rig: Rig, place: int = 0) -> None:
    """A part of a row is off by one."""
    entries = row(rig, place)
    entries[6:12] = entries[5:11].clone()


def point_at_free(rig: Rig) -> None:
    """An entry names a slot that nobody has."""
    allocator = rig.runner.token_to_kv_pool_allocator
    row(rig)[5] = int(torch.cat([allocator.free_pages, allocator.release_pages])[-1])


def exchange_rows(rig: Rig, batch: Any) -> None:
    """Two requests are computed with each other's slots."""
    batch.req_pool_indices = batch.req_pool_indices.clone()
    batch.req_pool_indices[[0, 1]] = batch.req_pool_indices[[1, 0]]


def hand_out_twice(rig: Rig) -> None:
    """The allocator gives a slot, or page, of a running request to whoever asks next."""
    allocator = rig.runner.token_to_kv_pool_allocator
    page = row(rig)[len(rig.running(3, DECODED)[0].origin_input_ids) - 2] // allocator.page_size
    free = torch.cat([page.reshape(1).to(allocator.free_pages.dtype), allocator.free_pages])
    allocator.free_pages = free


def shift_position(rig: Rig, batch: Any) -> None:
    """One request is computed as if it were one token further."""
    batch.positions = batch.positions.clone()
    batch.positions[0] += 1


def shift_positions(rig: Rig, batch: Any) -> None:
    """All requests are."""
    batch.positions = batch.positions + 1


def change_token(rig: Rig, batch: Any) -> None:
    """The model is given another token than was sampled."""
    batch.input_ids = batch.input_ids.clone()
    batch.input_ids[0] = (batch.input_ids[0] + 1) % 1000


def exchange_tokens(rig: Rig, batch: Any) -> None:
    """Two requests are given each other's newest token, as soon as these differ."""
    own = batch.input_ids.tolist()
    pairs = ((one, two) for two in range(len(own)) for one in range(two) if own[one] != own[two])
    one, two = next(pairs, (0, 0))
    if one == two:
        once(rig, exchange_tokens)
        return
    batch.input_ids = batch.input_ids.clone()
    batch.input_ids[[one, two]] = batch.input_ids[[two, one]]


def write_elsewhere(rig: Rig, batch: Any) -> None:
    """The new token's KV is written to a slot that another token has."""
    batch.out_cache_loc = batch.out_cache_loc.clone()
    batch.out_cache_loc[0] = rig.table[batch.req_pool_indices[0], 7]


def exchange_writes(rig: Rig, batch: Any) -> None:
    """Two new tokens are written to each other's slots."""
    batch.out_cache_loc = batch.out_cache_loc.clone()
    batch.out_cache_loc[[0, 1]] = batch.out_cache_loc[[1, 0]]


def swap_window_slots(rig: Rig) -> None:
    """Two entries of the mapping from full slots to window slots change places."""
    own = rig.runner.token_to_kv_pool_allocator.full_to_swa_index_mapping
    pair = row(rig)[place_in_window(rig) :][:2].long()
    own[pair] = own[pair.flip(0)]


def unmap_window_slot(rig: Rig) -> None:
    """A token within the window has no window slot any more."""
    own = rig.runner.token_to_kv_pool_allocator.full_to_swa_index_mapping
    own[int(row(rig)[place_in_window(rig)])] = 0


def place_in_window(rig: Rig) -> int:
    """A position that the longest request still reads some turns later."""
    request = rig.running(3, DECODED)[0]
    return len(request.origin_input_ids) - 4


def window_slot(rig: Rig) -> int:
    """The slot of that position in the pool of the windows."""
    own = rig.runner.token_to_kv_pool_allocator.full_to_swa_index_mapping
    return int(own[int(row(rig)[place_in_window(rig)])])


def cached_slot(rig: Rig) -> int:
    """The last slot that the prefix cache alone holds."""
    return int(rig.adapter.prefix_cache.cached("full", unlocked_only=True).slots[-1])


def buffers(pool: Any, part: Part) -> Any:
    """A pool's tensors by layer."""
    if hasattr(pool, "kv_buffer"):
        return pool.kv_buffer
    return pool.k_buffer if part is Part.K else pool.v_buffer


def flip_bit(pool: Any, part: Part, layer: int, slot: int) -> None:
    """One bit of a slot in one layer."""
    with torch.inference_mode():
        buffers(pool, part)[layer][slot].view(torch.uint8).view(-1)[5] ^= 16


def copy_slot(pool: Any, source: int, target: int) -> None:
    """All layers of a slot, over another one."""
    with torch.inference_mode():
        for part in Part:
            for layer in buffers(pool, part):
                layer[target] = layer[source]
