"""Decode attention over the paged pool in Triton: reads lengths and slots on the device, has fixed grids."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 64
_PROGRAMS = 1024  # enough to keep any GPU's memory busy
_MIN_QUERIES = 16  # the tensor cores' smallest tile


@triton.jit
def store_kernel(
    key, value, keys, values, out_slots, key_stride, value_stride, slot_stride,
    HEADS: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Program i stores token i's key and value in its slot; slot -1 = padding."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(out_slots + token).to(tl.int64)
    if slot >= 0:
        lane = tl.arange(0, SIZE)
        inside = lane < HEADS * DIM
        where = slot * slot_stride + lane
        tl.store(keys + where, tl.load(key + token * key_stride + lane, inside), inside)
        tl.store(values + where, tl.load(value + token * value_stride + lane, inside), inside)


@triton.jit
def attend_kernel(
    query, keys, values, table, rows, positions, mixed, weights, scale,
    query_stride, slot_stride, table_stride,
    GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Program (request, KV head, split): its share of the positions, as softmax numerator and logarithm.

    WINDOW: the last positions that are seen; 0 = all.
    """
    request, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    row = tl.load(rows + request).to(tl.int64)
    if row >= 0:
        length = tl.load(positions + request).to(tl.int32) + 1
        begin = tl.maximum(length - WINDOW, 0) if WINDOW else 0
        share = (length - begin + SPLITS - 1) // SPLITS
        first, last = begin + split * share, tl.minimum(begin + (split + 1) * share, length)
        lane, asked = tl.arange(0, WIDTH), tl.arange(0, QUERIES)
        inside = lane < DIM
        wanted = (asked < GROUP)[:, None] & inside[None, :]
        cell = (head * GROUP + asked)[:, None] * DIM + lane[None, :]
        q = tl.load(query + request * query_stride + cell, wanted, 0.0)
        best = tl.full([QUERIES], -1e30, tl.float32)
        total = tl.zeros([QUERIES], tl.float32)
        answer = tl.zeros([QUERIES, WIDTH], tl.float32)
        for start in range(first, last, BLOCK):
            place = start + tl.arange(0, BLOCK)
            known = place < last
            slot = tl.load(table + row * table_stride + place, known, 0).to(tl.int64)
            where = slot[:, None] * slot_stride + head * DIM + lane[None, :]
            both = known[:, None] & inside[None, :]
            k = tl.load(keys + where, both, 0.0)
            v = tl.load(values + where, both, 0.0)
            score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            score = tl.where(known[None, :], score, -1e30)
            higher = tl.maximum(best, tl.max(score, 1))
            weight = tl.exp(score - higher[:, None])
            fade = tl.exp(best - higher)
            total = total * fade + tl.sum(weight, 1)
            answer = answer * fade[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
            best = higher
        some = total > 0
        part = ((request * tl.num_programs(1) + head) * SPLITS + split) * GROUP
        safe = tl.where(some, total, 1.0)
        tl.store(mixed + (part + asked)[:, None] * DIM + lane[None, :], answer / safe[:, None], wanted)
        tl.store(weights + part + asked, tl.where(some, best + tl.log(safe), -1e30), asked < GROUP)


@triton.jit
def merge_kernel(
    mixed, weights, rows, output,
    GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Program (request, head) adds the splits up, each by its weight; padding, which has none, is 0."""
    request, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    first = (request * heads + head // GROUP * GROUP) * SPLITS + head % GROUP
    lane = tl.arange(0, WIDTH)
    inside = lane < DIM
    best, total, answer = -1e30, 0.0, tl.zeros([WIDTH], tl.float32)
    if tl.load(rows + request) >= 0:
        for split in tl.static_range(SPLITS):
            logarithm = tl.load(weights + first + split * GROUP)
            part = tl.load(mixed + (first + split * GROUP) * DIM + lane, inside, 0.0)
            higher = tl.maximum(best, logarithm)
            fade, weight = tl.exp(best - higher), tl.exp(logarithm - higher)
            total = total * fade + weight
            answer = answer * fade + part * weight
            best = higher
        answer = answer / total
    tl.store(output + (request * heads + head) * DIM + lane, answer.to(output.dtype.element_ty), inside)


class PagedAttention:
    """Attention of one token per request, for one batch size; its intermediate memory is its own."""

    def __init__(self, requests: int, heads: int, kv_heads: int, head_dim: int, device: torch.device) -> None:
        self._group, self._kv_heads, self._dim = heads // kv_heads, kv_heads, head_dim
        self._splits = max(1, min(32, _PROGRAMS // (requests * kv_heads)))
        parts = requests * heads * self._splits
        self._mixed = torch.empty((parts, head_dim), device=device)
        self._weights = torch.empty(parts, device=device)

    def store(self, kv: Tensor, out_slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Key and value [n, kv_heads, head_dim] into kv [2, slots, kv_heads, head_dim]; slot -1 = skip."""
        words = self._kv_heads * self._dim
        store_kernel[(out_slots.shape[0],)](
            key, value, kv[0], kv[1], out_slots, key.stride(0), value.stride(0), kv.stride(1),
            HEADS=self._kv_heads, DIM=self._dim, SIZE=triton.next_power_of_2(words),
        )  # fmt: skip

    def attend(
        self, kv: Tensor, query: Tensor, table: Tensor, rows: Tensor, positions: Tensor, window: int = 0
    ) -> Tensor:
        """[n, heads * head_dim] of query [n, heads, head_dim]; rows [n] (-1 = padding), positions [n].

        window: how many positions up to its own a token sees; 0 = all.
        """
        requests, heads = query.shape[:2]
        width = max(_MIN_QUERIES, triton.next_power_of_2(self._dim))
        attend_kernel[(requests, self._kv_heads, self._splits)](
            query, kv[0], kv[1], table, rows, positions, self._mixed, self._weights, self._dim**-0.5,
            query.stride(0), kv.stride(1), table.stride(0),
            GROUP=self._group, DIM=self._dim, WIDTH=width,
            QUERIES=max(_MIN_QUERIES, triton.next_power_of_2(self._group)),
            SPLITS=self._splits, BLOCK=BLOCK, WINDOW=window, num_stages=3,
        )  # fmt: skip
        output = torch.empty((requests, heads * self._dim), dtype=query.dtype, device=query.device)
        merge_kernel[(requests, heads)](
            self._mixed, self._weights, rows, output,
            GROUP=self._group, DIM=self._dim, WIDTH=width, SPLITS=self._splits,
        )  # fmt: skip
        return output
