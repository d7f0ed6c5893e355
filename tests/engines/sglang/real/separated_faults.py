"""Faults of a pair of servers: a slot that is damaged before it is sent, a copy in host memory."""

from __future__ import annotations

from typing import Any

import torch

from canary_obs.engines.sglang.speculation import draft_runners
from canary_obs.engines.sglang.states import slot_of
from canary_obs.vocabulary import Part
from tests.engines.sglang.real import index_keys, tiers
from tests.engines.sglang.real.planted import buffers, flip_bit
from tests.engines.sglang.real.rig import Rig


def damage_copy(rig: Rig, damaged: list[tuple[str, int]]) -> None:
    """A bit of a copy in host memory flips before it comes back; `damaged` is given its group and slot."""
    if rig.adapter.host_tier is not None:
        _damage_in_host_pool(rig, damaged)
        return
    allocator = rig.runner.token_to_kv_pool_allocator
    load = allocator.load_cpu_copy

    def load_cpu_copy(copy: Any, indices: Any, *more: Any, **named: Any) -> Any:
        if not damaged and isinstance(copy, tuple):  # of KV and states
            (conv, *_), _ = copy[1]
            conv[(0,) * conv.dim()] += 1
            damaged.append(("state", int(named["mamba_indices"])))
        elif not damaged:
            copy[1][0].view(torch.uint8)[4] ^= 1
            damaged.append(("full", int(indices[4])))
        return load(copy, indices, *more, **named)

    allocator.load_cpu_copy = load_cpu_copy


def _damage_in_host_pool(rig: Rig, damaged: list[tuple[str, int]]) -> None:
    """Of the last of the pools in a transfer: with drafts, theirs."""
    tier = tiers.tier(rig)
    engine = rig.scheduler.tree_cache.cache_controller.l2_transfer_engine
    load = engine.submit_host_to_device

    def submit_host_to_device(transfers: Any, **named: Any) -> Any:
        if not damaged:
            (*_, last) = transfers
            with torch.inference_mode():
                last.host_pool.kv_buffer[0][0][int(last.host_indices[4])].view(torch.uint8).view(-1)[3] ^= 4
            damaged.append((tier._groups[id(last.device_pool)], int(last.device_indices[4])))
        return load(transfers, **named)

    engine.submit_host_to_device = submit_host_to_device


def count_restored_drafts(rig: Rig, counts: list[int]) -> None:
    """Slots that come back from plain tensors, and those of them whose drafts' KV is the request's again.

    What they leave behind is overwritten: a request that gets its own slots back may find it there. Slots
    without drafts' KV, whose bytes are all zero, do not count.
    """
    allocator = rig.runner.token_to_kv_pool_allocator
    copy, load = allocator.get_cpu_copy, allocator.load_cpu_copy
    (pool,) = (runner.token_to_kv_pool for runner in draft_runners(rig.scheduler))
    (keys,) = pool.k_buffer
    held = dict[int, torch.Tensor]()

    def get_cpu_copy(indices: Any, *more: Any, **named: Any) -> Any:
        made = copy(indices, *more, **named)
        held[id(made)] = keys[indices.long()].clone()
        keys[indices.long()] = torch.randn_like(held[id(made)])
        return made

    def load_cpu_copy(made: Any, indices: Any, *more: Any, **named: Any) -> Any:
        result = load(made, indices, *more, **named)
        before = held.pop(id(made))
        drafted = before.flatten(1).any(1)
        counts[0] += int(drafted.sum())
        counts[1] += int((drafted & (keys[indices.long()] == before).flatten(1).all(1)).sum())
        return result

    allocator.get_cpu_copy, allocator.load_cpu_copy = get_cpu_copy, load_cpu_copy


def decode_together(rig: Rig) -> None:
    """The next request to arrive waits for another one: one alone is not taken back, and may end before."""
    from sglang.srt.disaggregation.base import KVPoll

    arriving = rig.scheduler.disagg_decode_transfer_queue
    pop = arriving.pop_transferred

    def pop_transferred(*given: Any, **named: Any) -> Any:
        polled = [request.kv_receiver.poll() for request in arriving.queue]
        if polled.count(KVPoll.Success) < 2:
            return []
        del arriving.pop_transferred
        return pop(*given, **named)

    arriving.pop_transferred = pop_transferred


def damage_before_sending(rig: Rig, groups: list[str], damaged: dict[str, tuple[str, int]]) -> None:
    """A bit of a slot of each group flips before it is sent, after the canary has fingerprinted it.

    `damaged` is given its request and position, by group.
    """
    send = rig.scheduler.send_kv_chunk

    def send_kv_chunk(req: Any, *more: Any, **named: Any) -> Any:
        if groups and named.get("last_chunk", more[0] if more else False):
            group = rig.adapter._by_name[groups[-1]]
            if group.by_row is not None:
                damaged[groups.pop()] = str(req.rid), 0
                states = rig.runner.req_to_token_pool.mamba_pool.mamba_cache
                states.conv[0][0][slot_of(req)].view(-1).view(torch.uint8)[7] ^= 8
                return send(req, *more, **named)
            place = (len(req.origin_input_ids) - 3) // group.ratio
            if group.ratio > 1:
                place -= 1  # the last one of a whole run
            if place >= 0:
                damaged[groups.pop()] = str(req.rid), place
                slot = int(rig.table[req.kv.req_pool_idx, place * group.ratio]) // group.ratio
                own = group.own_slots
                pool = rig.runner.token_to_kv_pool
                if group.view.name == "draft":
                    (pool,) = (runner.token_to_kv_pool for runner in draft_runners(rig.scheduler))
                _flip_bit(pool, group.view.name, slot if own is None else int(own[torch.tensor(slot)]))
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
        held = getattr(pool, f"{name}_kv_pool", pool)
        flip_bit(held, Part.K, min(1, len(buffers(held, Part.K)) - 1), slot)
