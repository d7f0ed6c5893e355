"""Layer writes in Triton: one program per slot reads the slot's bytes of one layer."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import triton
import triton.language as tl

from canary_kernels import layout
from canary_kernels.fingerprint.outcome import LOST_REASON, NOBODY, PART_K, PART_V, TAIL
from canary_kernels.fingerprint.shape import shape_of
from canary_kernels.fingerprint.words import hash_slot, is_held
from canary_kernels.jit import COMPLETE, NUM_REASONS, RECORD_WORDS, position_of, report, state_of
from canary_kernels.launch import prepare

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from canary_kernels.buffers import GroupBuffers
    from canary_kernels.fingerprint.plan import FingerprintPlan
    from canary_kernels.launch import Start

COUNT_LAYER_CHECKED = tl.constexpr(layout.COUNT_LAYER_CHECKED)
COUNT_LAYER_LEFT_OUT = tl.constexpr(layout.COUNT_LAYER_LEFT_OUT)
LOW_WORD = tl.constexpr((1 << 32) - 1)
NOTE, CHECK = 0, 1


@triton.jit(
    do_not_specialize=["num_slots", "lane_rows", "num_k", "num_sources"],
    do_not_specialize_on_alignment=["slots", "table", "word_keys"],
)
def layer_kernel(
    records, counters, violations, clock, num_slots, lane_rows,
    slots, witness, table, word_keys, num_k, num_sources,
    CHECKING: tl.constexpr,
    GEOMETRY: tl.constexpr, PAGES: tl.constexpr, ALIGNMENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program i notes, or checks, the i-th slot; witness = int64 [n, 4]: slot, identity, hashes."""
    index = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + index).to(tl.int64)
    noted = witness + index * 4
    known = is_held(slot, PAGES) & (slot < num_slots)
    identity = tl.load(records + slot * RECORD_WORDS, mask=known, other=0)
    if CHECKING:
        known = known & (tl.load(noted) == slot) & (state_of(identity) == COMPLETE)
    hash_k = slot * 0
    hash_v = slot * 0
    if known:
        hash_k, hash_v = hash_slot(
            table, word_keys, slot, num_k, num_sources, GEOMETRY, PAGES, ALIGNMENT, BLOCK
        )
    if CHECKING:
        buffers = (counters, violations, clock, lane_rows)
        old = tl.load(noted + 1)
        before_k = tl.load(noted + 2)
        before_v = tl.load(noted + 3)
        replaced = (state_of(old) == COMPLETE) & (((old ^ identity) & LOW_WORD) != 0)
        lane = TAIL * NUM_REASONS + LOST_REASON
        position = position_of(identity)
        # A token alone may rightly leave zeros: it attends to nothing else.
        zero_k = (position > 0) & (before_k == 0)
        zero_v = (position > 0) & (before_v == 0)
        lost = known & (num_k > 0) & (before_k == hash_k) & (replaced | zero_k)
        if lost:
            report(buffers, lost, lane, slot, position, NOBODY, PART_K, before_k, hash_k)
        lost = known & (num_sources > num_k) & (before_v == hash_v) & (replaced | zero_v)
        if lost:
            report(buffers, lost, lane, slot, position, NOBODY, PART_V, before_v, hash_v)
        counter = tl.where(known, COUNT_LAYER_CHECKED, COUNT_LAYER_LEFT_OUT)
        tl.atomic_add(counters + counter, 1, sem="relaxed")
        tl.store(noted, slot * 0 - 1)
    else:
        tl.store(noted, tl.where(known, slot, -1))
        tl.store(noted + 1, identity)
        tl.store(noted + 2, hash_k)
        tl.store(noted + 3, hash_v)


def _launch(
    checking: int, buffers: GroupBuffers, layer: FingerprintPlan, witness: Tensor, slots: Tensor
) -> Callable[[], None] | None:
    """Launch; see `op.note_layer` and `op.check_layer`; returns what does it again. None = compiled."""
    (bundle,), count = layer.bundles, slots.shape[0]
    if not count:
        return None
    key = "layer_kernel", checking, bundle.geometry, bundle.alignment, slots.dtype
    start: Start | None = buffers.cache.get(key)
    sizes = bundle.num_k, len(bundle.sources)
    if start is not None:
        memory = slots, witness, bundle.table, bundle.word_keys
        launch = start.again((count, 1), (*(tensor.data_ptr() for tensor in memory), *sizes))
        launch()
        return launch
    given = slots, witness, bundle.table, bundle.word_keys, *sizes
    constants = {"CHECKING": checking, **shape_of(bundle)}
    buffers.cache[key] = prepare(layer_kernel, buffers, (count, 1), given, constants)
    return None


note_layer = functools.partial(_launch, NOTE)
check_layer = functools.partial(_launch, CHECK)
