"""Hashes slots on the CPU: layer after layer, run after run of words; and plans as frames of addresses."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import numpy as np

from canary_kernels.frames import Frame
from canary_kernels.layout import RealData
from canary_kernels.native import load_int64, load_uint8, load_uint32, piece

if TYPE_CHECKING:
    from canary_kernels.buffers import GroupBuffers
    from canary_kernels.fingerprint.plan import FingerprintPlan

# Words of a plan's frame: the head, then _BUNDLE_WORDS for each bundle.
COVERED, NUM_BUNDLES, PLAN_SLOTS, _RANKS, _RANK, _INTERLEAVE, _HEAD_WORDS = range(7)
(
    _TABLE, _WORD_KEYS, _NUM_SOURCES, _NUM_K, _PAGE_SIZE, _PAGE_STRIDE, _TILE_SIZE, _TILE_STRIDE,
    _SLOT_STRIDE, _HEAD_BYTES, _HEAD_STRIDE, _BAND_BYTES, _BAND_STRIDE, _ELEMENT_BYTES, _ELEMENT_STRIDE,
    _NUM_BYTES, _ALIGNMENT, _BUNDLE_WORDS,
) = range(18)  # fmt: skip
_WORD_BYTES = 4


@piece
def _sum_words(address, keys, length):
    """uint64: words that follow one another, each times its key; keys = address of the first one's."""
    total = np.uint64(0)
    for word in range(length):
        total += load_uint32(address, word) * np.uint64(load_int64(keys, word))
    return total


@piece
def _sum_run_bytes(address, keys, first, length):
    """uint64: bytes that follow one another, each as its place in its word times the word's key."""
    total = np.uint64(0)
    for byte in range(length):
        number = first + byte
        value = load_uint8(address, byte) << np.uint64(8 * (number % _WORD_BYTES))
        total += value * np.uint64(load_int64(keys, number // _WORD_BYTES))
    return total


@piece
def _sum_source(address, bundle, keys, whole):
    """uint64: a slot in one source; whole = its runs are aligned words.

    Without, it goes byte by byte; what is missing of the last word counts as zeros.
    """
    head_bytes, head_stride = load_int64(bundle, _HEAD_BYTES), load_int64(bundle, _HEAD_STRIDE)
    band_bytes, band_stride = load_int64(bundle, _BAND_BYTES), load_int64(bundle, _BAND_STRIDE)
    element_bytes, element_stride = load_int64(bundle, _ELEMENT_BYTES), load_int64(bundle, _ELEMENT_STRIDE)
    covered = load_int64(bundle, _NUM_BYTES)
    total, number = np.uint64(0), 0
    while number < covered:
        head_end, band_at = min(number + head_bytes, covered), address
        while number < head_end:
            band_end, run = min(number + band_bytes, head_end), band_at
            while number < band_end:
                length = min(element_bytes, band_end - number)
                if whole:
                    total += _sum_words(run, keys + 2 * number, length // _WORD_BYTES)
                else:
                    total += _sum_run_bytes(run, keys, number, length)
                number += length
                run += element_stride
            band_at += band_stride
        address += head_stride
    return total


@piece
def hash_slot(plan, slot):
    """uint64 pair: fingerprints of K and V as the bytes are now; 0 for another rank's slot."""
    hash_k = hash_v = np.uint64(0)
    ranks = load_int64(plan, _RANKS)
    if ranks > 1:
        run = load_int64(plan, _INTERLEAVE)
        if slot // run % ranks != load_int64(plan, _RANK):
            return hash_k, hash_v
        slot = slot // (run * ranks) * run + slot % run
    for number in range(load_int64(plan, NUM_BUNDLES)):
        bundle = plan + 8 * (_HEAD_WORDS + number * _BUNDLE_WORDS)
        page_size, page_stride = load_int64(bundle, _PAGE_SIZE), load_int64(bundle, _PAGE_STRIDE)
        page = slot // page_size
        in_page, tile_size = slot - page * page_size, load_int64(bundle, _TILE_SIZE)
        tile = in_page // tile_size
        start = page * page_stride + tile * load_int64(bundle, _TILE_STRIDE)
        start += (in_page - tile * tile_size) * load_int64(bundle, _SLOT_STRIDE)
        table, keys = load_int64(bundle, _TABLE), load_int64(bundle, _WORD_KEYS)
        sources, num_k = load_int64(bundle, _NUM_SOURCES), load_int64(bundle, _NUM_K)
        whole = load_int64(bundle, _ALIGNMENT) % _WORD_BYTES == 0
        for source in range(sources):
            address = load_int64(table, source) + start
            total = _sum_source(address, bundle, keys, whole)
            total *= np.uint64(load_int64(table, sources + source))
            if source < num_k:
                hash_k += total
            else:
                hash_v += total
    return hash_k, hash_v


def frame_in(buffers: GroupBuffers, plan: FingerprintPlan) -> int:
    """Address of a plan's frame; made once for the buffers it is used with."""
    known: tuple[FingerprintPlan, Frame] | None = buffers.cache.get(frame_in)
    if known is None or known[0] is not plan:
        known = buffers.cache[frame_in] = plan, frame_of_plan(plan)
    return known[1].address


def frame_of_plan(plan: FingerprintPlan) -> Frame:
    covered = plan.coverage is not RealData.NONE
    sharding = plan.sharding.ranks, plan.sharding.rank, plan.sharding.interleave
    words = array("q", (covered, len(plan.bundles), plan.num_slots or 0, *sharding))
    for bundle in plan.bundles:
        where = bundle.geometry
        words.extend((
            bundle.table.data_ptr(), bundle.word_keys.data_ptr(), len(bundle.sources), bundle.num_k,
            where.page_size, where.page_stride, where.tile_size, where.tile_stride, where.slot_stride,
            where.head_bytes, where.head_stride, where.band_bytes, where.band_stride, where.element_bytes,
            where.element_stride, where.num_bytes, bundle.alignment,
        ))  # fmt: skip
    tables = [table for bundle in plan.bundles for table in (bundle.table, bundle.word_keys)]
    tensors = [source.tensor for bundle in plan.bundles for source in bundle.sources]
    return Frame(words.buffer_info()[0], words, (*tables, *tensors))
