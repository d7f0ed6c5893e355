"""Digest in Triton: one program per request of the batch, one launch per step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from canary_kernels.jit import ANCHOR, mix64
from canary_kernels.launch import Start

if TYPE_CHECKING:
    from torch import Tensor

    from canary_kernels.digest.steps import DigestMemory, InputTokens, TokenLists

# A decode step adds one token per request; a prompt found in the cache, or just prefilled, adds thousands.
_BLOCK, _WARPS = 1024, 4


@triton.jit
def _added(tokens, first, count, BLOCK: tl.constexpr):
    """int64: what tokens[:count], the first of them at position `first`, add to a chain."""
    offset = tl.arange(0, BLOCK).to(tl.int64)
    total = tl.zeros([BLOCK], tl.int64)
    for start in range(0, count, BLOCK):
        index = start + offset
        mask = index < count
        token = tl.load(tokens + index, mask=mask, other=0).to(tl.int32).to(tl.int64)
        total += tl.where(mask, mix64(token, first + index).to(tl.int64), 0)
    return tl.sum(total)


@triton.jit(
    do_not_specialize=["stride", "num_rows", "width"],
    do_not_specialize_on_alignment=["rows", "token_starts"],
)
def lists_kernel(
    chains, counts, digests, prefix_lens, extend_lens,
    tokens, stride, num_rows, width, computed, rows, token_starts, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program i advances the request at place i of the batch by the engine's own token list."""
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + place).to(tl.int64)
    extend = tl.load(token_starts + place + 1) - tl.load(token_starts + place)
    known = (row >= 0) & (row < num_rows)
    stop = tl.load(computed + row, mask=known, other=-1).to(tl.int64)
    first = tl.load(counts + row, mask=known, other=0)
    chain = tl.load(chains + row, mask=known, other=0)
    known = known & (stop >= 0) & (stop <= width)
    begins = (first <= 0) | (first > stop)
    first = tl.where(begins, 0, first)
    chain = tl.where(begins, tl.full(chain.shape, ANCHOR, tl.uint64).to(tl.int64), chain)
    chain += _added(tokens + row * stride + first, first, tl.where(known, stop - first, 0), BLOCK)
    tl.store(chains + row, chain, mask=known)
    tl.store(counts + row, stop, mask=known)
    tl.store(digests + place, tl.where(known, chain, 0))
    tl.store(prefix_lens + place, tl.where(known, stop, -1).to(tl.int32))
    tl.store(extend_lens + place, extend.to(tl.int32))


@triton.jit(
    do_not_specialize=["stride", "num_rows", "num_tokens"],
    do_not_specialize_on_alignment=["places", "input_ids", "token_starts", "prefix_lens"],
)
def inputs_kernel(
    chains, digests, counts, tails, places, stride, num_rows, num_tokens,
    input_ids, token_starts, prefix_lens,
    BLOCK: tl.constexpr, TAIL: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """Program i stores the chain before the inputs of the request at place i, then adds them to its row.

    With TAIL > 0 the last of them wait in `tails` until the next prefix length shows how many were accepted.
    ROOM: TAIL rounded up to a power of two.
    """
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(places + place)
    known = (row >= 0) & (row < num_rows)
    fresh = tl.load(places + stride + place)
    start = tl.load(places + 2 * stride + place)
    first_token = tl.load(token_starts + place).to(tl.int64)
    extend = tl.load(token_starts + place + 1).to(tl.int64) - first_token
    prefix = tl.load(prefix_lens + place).to(tl.int64)
    known = known & (first_token >= 0) & (extend >= 0) & (extend <= num_tokens - first_token)
    extend = tl.where(known, extend, 0)
    chain = tl.where(fresh != 0, start, tl.load(chains + row, mask=known, other=0))
    if TAIL > 0:
        count = tl.load(counts + row, mask=known, other=0)
        accepted = tl.where((fresh != 0) | ~known, 0, tl.minimum(prefix - count, TAIL))
        chain += _added(tails + row * TAIL, count, accepted, BLOCK)
        kept = tl.minimum(extend, TAIL)
        extend -= kept
        tl.store(counts + row, prefix + extend, mask=known)
        # Other threads of this program may still read what is stored over here.
        tl.debug_barrier()
        offset = tl.arange(0, ROOM)
        token = tl.load(input_ids + first_token + extend + offset, mask=offset < kept, other=0)
        tl.store(tails + row * TAIL + offset, token.to(tl.int32), mask=offset < kept)
    tl.store(digests + place, chain)
    tl.store(chains + row, chain + _added(input_ids + first_token, prefix, extend, BLOCK), mask=known)
    tl.store(places + stride + place, fresh * 0)


def follow_lists(memory: DigestMemory, lists: TokenLists) -> None:
    """Launch; see `op.follow_lists`."""
    tokens, computed, places, starts = lists.tokens, lists.computed, lists.rows, lists.token_starts
    requests, types = places.shape[0], (places.dtype, starts.dtype)
    # Most engines make the rows anew for each step, and keep the rest where it is.
    ready = memory.cache.get(follow_lists)
    if ready is not None and ready[0] is tokens and ready[1] is computed and ready[2] == types:
        ready[3]((requests, 1), (*ready[4], places.data_ptr(), starts.data_ptr()))
        return
    kept = memory.chains, memory.counts, memory.digests, memory.prefix_lens, memory.extend_lens
    rows = min(memory.chains.shape[0], tokens.shape[0], computed.shape[0])
    given = tokens, tokens.stride(0), rows, tokens.shape[1], computed, places, starts
    start = _launch(lists_kernel, memory, requests, kept, given, {"BLOCK": _BLOCK})
    if start is not None:
        memory.cache[follow_lists] = tokens, computed, types, start, _addresses(given[:-2])


def follow_inputs(memory: DigestMemory, fed: InputTokens) -> None:
    """Launch; see `op.follow_inputs`."""
    ready = memory.cache.get(follow_inputs)
    if ready is not None and ready[0] is fed:
        ready[1]()
        return
    places = fed.places
    rows, tokens = memory.chains.shape[0], fed.input_ids.shape[0]
    given = places, places.stride(0), rows, tokens, fed.input_ids, fed.token_starts, fed.prefix_lens
    kept = memory.chains, memory.digests, memory.counts, memory.tails
    tail = memory.tails.shape[1]
    constants = {"BLOCK": _BLOCK, "TAIL": tail, "ROOM": triton.next_power_of_2(tail)}
    start = _launch(inputs_kernel, memory, places.shape[1], kept, given, constants)
    if start is not None:
        memory.cache[follow_inputs] = fed, start.again((places.shape[1], 1), _addresses(given))


def _launch(
    kernel: Any,
    memory: DigestMemory,
    requests: int,
    kept: tuple[Tensor, ...],
    given: tuple[Any, ...],
    constants: dict[str, int],
) -> Start | None:
    """Launch; returns what launches it again with other arguments of these types, None = nothing compiled."""
    grid = requests, 1
    types = tuple(getattr(value, "dtype", None) for value in given)
    start: Start | None = memory.cache.get((kernel, types))
    if start is not None:
        start(grid, _addresses(given))
        return start
    compiled = kernel[grid](*kept, *given, **constants, num_warps=_WARPS)
    if not hasattr(compiled, "packed_metadata"):
        return None
    start = Start(compiled, memory.chains.device, _addresses(kept), tuple(constants.values()))
    memory.cache[kernel, types] = start
    return start


def _addresses(given: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(value.data_ptr() if isinstance(value, torch.Tensor) else value for value in given)
