"""Faults of a pair of servers: a slot that is damaged before it is sent, a copy in host memory."""

from __future__ import annotations

from typing import Any

import torch

from canary_obs.vocabulary import Part
from tests.engines.sglang.real import index_keys
from tests.engines.sglang.real.planted import flip_bit
from tests.engines.sglang.real.rig import Rig


def damage_copy(rig: Rig, damaged: list[tuple[str, int]]) -> None:
    """A bit of a copy in host memory flips before it comes back; `damaged` is given its group and slot."""
    allocator = rig.runner.token_to_kv_pool_allocator
    load = allocator.load_cpu_copy

    def load_cpu_copy(copy: Any, indices: Any, *more: Any, **named: Any) -> Any:
        if not damaged:
            copy[1][0].view(torch.uint8)[4] ^= 1
            damaged.append(("full", int(indices[4])))
        return load(copy, indices, *more, **named)

    allocator.load_cpu_copy = load_cpu_copy


def damage_before_sending(rig: Rig, groups: list[str], damaged: dict[str, tuple[str, int]]) -> None:
    """A bit of a slot of each group flips before it is sent, after the canary has fingerprinted it.

    `damaged` is given its request and position, by group.
    """
    send = rig.scheduler.send_kv_chunk

    def send_kv_chunk(req: Any, *more: Any, **named: Any) -> Any:
        if groups and named.get("last_chunk", more[0] if more else False):
            group = rig.adapter._by_name[groups[-1]]
            place = (len(req.origin_input_ids) - 3) // group.ratio
            if group.ratio > 1:
                place -= 1  # the last one of a whole run
            if place >= 0:
                damaged[groups.pop()] = str(req.rid), place
                slot = int(rig.table[req.kv.req_pool_idx, place * group.ratio]) // group.ratio
                own = group.own_slots
                _flip_bit(
                    rig.runner.token_to_kv_pool, group.view.name, slot if own is None else int(own[slot])
                )
        return send(req, *more, **named)

    rig.scheduler.send_kv_chunk = send_kv_chunk


def _flip_bit(pool: Any, name: str, slot: int) -> None:
    if name.endswith("indexer"):
        keys = getattr(pool, "c4_indexer_kv_pool", pool)
        pages, size = keys.index_k_with_scale_buffer[0], int(keys.page_size)
        pages.view(torch.uint8)[slot // size, slot % size * index_keys.SIZE + 7] ^= 8
    elif hasattr(pool, "c4_kv_pool"):
        rows = getattr(pool, f"{name}_kv_pool")
        pages, size = rows.kv_buffer[1], int(rows.page_size)
        pages.view(torch.uint8)[slot // size, slot % size * 576 + 7] ^= 8
    else:
        flip_bit(getattr(pool, f"{name}_kv_pool", pool), Part.K, 1, slot)
