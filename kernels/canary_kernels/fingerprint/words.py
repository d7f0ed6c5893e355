"""Triton functions that read a slot's words and sum them up under their keys."""

from __future__ import annotations

import triton
import triton.language as tl

from canary_kernels.fingerprint.shape import LONG_BYTES

_LONG_BYTES = tl.constexpr(LONG_BYTES)


@triton.jit
def _byte_offset(index, GEOMETRY: tl.constexpr):
    """int64: where the index-th byte of a slot lies from the slot's first byte."""
    head_bytes: tl.constexpr = GEOMETRY[0]
    head_stride: tl.constexpr = GEOMETRY[1]
    element_bytes: tl.constexpr = GEOMETRY[2]
    element_stride: tl.constexpr = GEOMETRY[3]
    num_bytes: tl.constexpr = GEOMETRY[4]
    band_bytes: tl.constexpr = GEOMETRY[5]
    band_stride: tl.constexpr = GEOMETRY[6]
    furthest: tl.constexpr = (
        (num_bytes - 1) // head_bytes * head_stride
        + (head_bytes - 1) // band_bytes * band_stride
        + (band_bytes - 1) // element_bytes * element_stride
        + element_bytes
    )
    if furthest >= 1 << 31:  # head-major pools; elsewhere 32 bits are faster
        index = index.to(tl.int64)
    if num_bytes <= head_bytes and element_bytes == head_bytes:
        offset = index
    else:
        within = index % head_bytes
        offset = index // head_bytes * head_stride
        if band_bytes < head_bytes:
            offset += within // band_bytes * band_stride
            within = within % band_bytes
        offset += within // element_bytes * element_stride + within % element_bytes
    return offset.to(tl.int64)


@triton.jit
def _load_words(base, words, mask, GEOMETRY: tl.constexpr, ALIGNMENT: tl.constexpr):
    """int64: little-endian uint32 words of a slot whose first byte lies at address base; 0 where masked."""
    num_bytes: tl.constexpr = GEOMETRY[4]
    if ALIGNMENT >= 4:
        pointers = (base + _byte_offset(words * 4, GEOMETRY)).to(tl.pointer_type(tl.uint32))
        # The compiler cannot know the alignment of an address it loads; with it, lanes read whole vectors.
        pointers = tl.max_contiguous(tl.multiple_of(pointers, ALIGNMENT), ALIGNMENT // 4)
        value = tl.load(pointers, mask=mask, other=0).to(tl.int64)
    else:
        pointers = base.to(tl.pointer_type(tl.uint8))
        value = tl.zeros(words.shape, tl.int64)
        for byte in tl.static_range(4):
            index = words * 4 + byte
            loaded = tl.load(pointers + _byte_offset(index, GEOMETRY), mask=index < num_bytes, other=0)
            value += loaded.to(tl.int64) << (8 * byte)
    return value


@triton.jit
def _hash_part(
    table, word_keys, start, first_source, end, num_sources, first_word, step,
    GEOMETRY: tl.constexpr, ALIGNMENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """int64: sum over blocks of words, from first_word on in steps, of the sources first_source to end."""
    num_words: tl.constexpr = (GEOMETRY[4] + 3) // 4
    total = start * 0
    for first in range(first_word, num_words, step):
        words = first + tl.arange(0, BLOCK)
        mask = words < num_words
        sums = tl.zeros([BLOCK], tl.int64)
        fours = first_source + (end - first_source) // 4 * 4
        # Four reads under way at once. Bounds of run time: with constants, the compiler unrolls all and
        # schedules fewer reads ahead.
        for source in range(first_source, fours, 4):
            a = _load_words(tl.load(table + source) + start, words, mask, GEOMETRY, ALIGNMENT)
            b = _load_words(tl.load(table + source + 1) + start, words, mask, GEOMETRY, ALIGNMENT)
            c = _load_words(tl.load(table + source + 2) + start, words, mask, GEOMETRY, ALIGNMENT)
            d = _load_words(tl.load(table + source + 3) + start, words, mask, GEOMETRY, ALIGNMENT)
            key = table + num_sources + source
            sums += a * tl.load(key) + b * tl.load(key + 1) + c * tl.load(key + 2) + d * tl.load(key + 3)
        for source in range(fours, end):
            base = tl.load(table + source) + start
            layer_key = tl.load(table + num_sources + source)
            sums += _load_words(base, words, mask, GEOMETRY, ALIGNMENT) * layer_key
        keys = tl.load(word_keys + words, mask=mask, other=0)
        total += tl.sum(sums * keys)
    return total


@triton.jit
def is_held(slot, PAGES: tl.constexpr):
    """Whether a slot's bytes lie on this rank; all do where slots are not spread over ranks."""
    held = slot >= 0
    if PAGES[5] > 1:
        held = held & (slot // PAGES[7] % PAGES[5] == PAGES[6])
    return held


@triton.jit
def hash_slot(
    table, word_keys, slot, num_k, num_sources,
    GEOMETRY: tl.constexpr, PAGES: tl.constexpr, ALIGNMENT: tl.constexpr, BLOCK: tl.constexpr,
    SPLIT: tl.constexpr = False,
):  # fmt: skip
    """int64 pair: sums over the words of a bundle's K sources and V sources; 0 for another rank's slot.

    SPLIT: over this program's share of the words or sources; the programs along axis 1 have one each.
    """
    hash_k = slot * 0
    hash_v = slot * 0
    if PAGES[5] > 1:
        if is_held(slot, PAGES):
            local = slot // (PAGES[7] * PAGES[5]) * PAGES[7] + slot % PAGES[7]
            hash_k, hash_v = _hash_held(
                table, word_keys, local, num_k, num_sources, GEOMETRY, PAGES, ALIGNMENT, BLOCK, SPLIT
            )
    else:
        hash_k, hash_v = _hash_held(
            table, word_keys, slot, num_k, num_sources, GEOMETRY, PAGES, ALIGNMENT, BLOCK, SPLIT
        )
    return hash_k, hash_v


@triton.jit
def _hash_held(
    table, word_keys, slot, num_k, num_sources,
    GEOMETRY: tl.constexpr, PAGES: tl.constexpr, ALIGNMENT: tl.constexpr, BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """int64 pair: the same of a slot of this rank, by its number here."""
    start = slot // PAGES[0] * PAGES[1]
    if PAGES[3] < PAGES[0]:
        in_page = slot % PAGES[0]
        start += in_page // PAGES[3] * PAGES[4] + in_page % PAGES[3] * PAGES[2]
    else:
        start += slot % PAGES[0] * PAGES[2]
    first, end_k, first_v, end = 0, num_k, num_k, num_sources
    word: tl.constexpr = 0
    step: tl.constexpr = BLOCK
    if SPLIT and GEOMETRY[4] > _LONG_BYTES:
        word, step = tl.program_id(1) * BLOCK, tl.num_programs(1) * BLOCK
    elif SPLIT:
        share = tl.cdiv(num_sources, tl.num_programs(1))
        first = tl.minimum(tl.program_id(1) * share, num_sources)
        end = tl.minimum(first + share, num_sources)
        end_k, first_v = tl.minimum(end, num_k), tl.maximum(first, num_k)
    hash_k = _hash_part(
        table, word_keys, start, first, end_k, num_sources, word, step, GEOMETRY, ALIGNMENT, BLOCK
    )
    hash_v = _hash_part(
        table, word_keys, start, first_v, end, num_sources, word, step, GEOMETRY, ALIGNMENT, BLOCK
    )
    return hash_k, hash_v
