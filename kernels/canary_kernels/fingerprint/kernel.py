"""Fingerprint in Triton: one program per slot, which keeps a sum per word while it walks the layers.

The sum over layers l of layer_key(l) * sum over words i of word_key(i) * w[l, i] is taken over l first:
one reduction per slot.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import triton
import triton.language as tl

from canary_kernels import layout
from canary_kernels.buffers import COMPLETION_ROW, SHARE_WORDS, GroupBuffers, allocate_shares
from canary_kernels.fingerprint.outcome import (
    BASELINING,
    COMPARING,
    COMPLETING,
    COUNT_BASELINE_RUNS,
    COUNT_COMPLETE_RUNS,
    COUNT_RUNS,
    HASH,
    HIT,
    PATROL,
    concerns,
    count_left_out,
    count_skipped,
    count_without_history,
    finish,
    report_flaw,
    sum_of_shares,
)
from canary_kernels.fingerprint.plan import SCRATCH_SLOTS
from canary_kernels.fingerprint.shape import has_long_rows, shape_of, split_of
from canary_kernels.fingerprint.words import hash_slot
from canary_kernels.jit import CHAIN, RECORD_WORDS, flaw_of, state_of
from canary_kernels.launch import prepare
from canary_kernels.layout import Phase

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from canary_kernels.fingerprint.plan import FingerprintPlan
    from canary_kernels.launch import Start

_MAX_PROGRAMS = 1 << 16
_SHARE_WORDS = tl.constexpr(SHARE_WORDS)
_Ready: TypeAlias = "tuple[FingerprintPlan, list[Start]]"


@triton.jit(
    do_not_specialize=["num_slots", "lane_rows", "slots", "num_listed", "num_k", "num_sources"],
    do_not_specialize_on_alignment=["hashes", "shares"],
)
def fingerprint_kernel(
    records, counters, violations, clock, num_slots, lane_rows,
    slots, num_listed, hashes, shares, table, word_keys, num_k, num_sources,
    OP: tl.constexpr, PHASE: tl.constexpr, HAS_DATA: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
    COUNTED: tl.constexpr, LISTED: tl.constexpr, SPLIT: tl.constexpr,
    GEOMETRY: tl.constexpr, PAGES: tl.constexpr, ALIGNMENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Programs take slots in turn: a list, or the first of a range.

    FIRST and LAST frame the bundles; sums between them wait in `hashes`. SPLIT: the programs along axis 1
    read a share of a slot's bytes each, and the last to come finishes with their sum.
    """
    program = tl.program_id(0).to(tl.int64)
    leads = tl.program_id(1) == 0
    buffers = (counters, violations, clock, lane_rows)
    if COUNTED and leads and program == 0:
        if OP == COMPLETING:
            tl.atomic_add(counters + COUNT_COMPLETE_RUNS, 1, sem="relaxed")
        elif OP == BASELINING:
            tl.atomic_add(counters + COUNT_BASELINE_RUNS, 1, sem="relaxed")
        elif PHASE == PATROL or PHASE == HIT:  # noqa: SIM109 - Triton
            tl.atomic_add(counters + COUNT_RUNS + PHASE, 1, sem="relaxed")
    for index in range(program, num_listed, tl.num_programs(0)):
        slot = tl.load(slots + index).to(tl.int64) if LISTED else slots + index
        if (slot >= 0) & (slot < num_slots):
            identity = slot * 0
            wanted = slot >= 0
            if OP != HASH:
                identity = tl.load(records + slot * RECORD_WORDS)
                state = state_of(identity)
                if OP != COMPLETING:
                    flaw = flaw_of(identity, tl.load(records + slot * RECORD_WORDS + CHAIN))
                    state = tl.where(flaw == 0, state, -1)
                wanted = concerns(state, OP)
                if OP == COMPARING and FIRST and leads:
                    count_skipped(counters, state, HAS_DATA, PHASE)
                    report_flaw(buffers, slot, identity, flaw, PHASE)
                if OP == BASELINING and FIRST and leads:
                    count_without_history(counters, state, HAS_DATA)
            if OP != HASH and OP != COMPLETING and not HAS_DATA:
                wanted = slot < 0
            ends = leads
            hash_k = slot * 0
            hash_v = slot * 0
            if SPLIT:
                if wanted:
                    hash_k, hash_v = hash_slot(
                        table, word_keys, slot, num_k, num_sources, GEOMETRY, PAGES, ALIGNMENT, BLOCK, SPLIT
                    )
                share = shares + index * _SHARE_WORDS
                ends, wanted, hash_k, hash_v = sum_of_shares(share, wanted, hash_k, hash_v)
            if ends and wanted:
                if GEOMETRY[4] > 0 and not SPLIT:
                    hash_k, hash_v = hash_slot(
                        table, word_keys, slot, num_k, num_sources, GEOMETRY, PAGES, ALIGNMENT, BLOCK
                    )
                if not FIRST:
                    hash_k += tl.load(hashes + index * 2)
                    hash_v += tl.load(hashes + index * 2 + 1)
                if OP == HASH or not LAST:
                    tl.store(hashes + index * 2, hash_k)
                    tl.store(hashes + index * 2 + 1, hash_v)
                else:
                    finish(records, buffers, slot, identity, hash_k, hash_v, HAS_DATA, OP, PHASE)
            elif ends:
                count_left_out(counters, OP, PHASE, LAST)
        elif leads:
            count_left_out(counters, OP, PHASE, LAST)


def launch(
    op: int,
    buffers: GroupBuffers,
    plan: FingerprintPlan,
    slots: Tensor | range,
    phase: Phase = Phase.TAIL,
    stream: torch.Stream | None = None,
    row: int | None = None,
) -> Callable[[], None] | None:
    """One launch per bundle of the plan, at least one; op is COMPLETING, BASELINING or COMPARING.

    Sums of several bundles wait in the plan's scratch, so slots then come in chunks of SCRATCH_SLOTS.
    row: of `buffers.shares`, where several programs may sum up one slot; None = a program reads a slot alone,
    unless its rows are long. Returns what does it again; None = it was compiled, takes several launches, or
    sums up where its stream does.
    """
    scratch, again = plan.scratch, None
    starts = (0,) if scratch is None else range(0, max(1, len(slots)), SCRATCH_SLOTS)
    for first in starts:
        chunk, hashes = (
            (slots, buffers.counters) if scratch is None else (slots[first : first + SCRATCH_SLOTS], scratch)
        )
        if isinstance(chunk, range):
            place, count, kind = chunk.start, len(chunk), range
        else:
            place, count, kind = chunk.data_ptr(), chunk.shape[0], chunk.dtype
        shares, split = _shares(buffers, plan, count, row, stream)
        grid = max(1, min(count, _MAX_PROGRAMS)), split
        work = op, phase, first == starts[-1], kind, stream, split > 1
        ready: _Ready | None = buffers.cache.get(("fingerprint", *work))
        if ready is None or ready[0] is not plan:
            given = place if isinstance(chunk, range) else chunk
            _prepare(buffers, plan, work, grid, (given, count, hashes, shares))
            continue
        for start in ready[1]:
            again = start.again(grid, (place, count, hashes.data_ptr(), shares.data_ptr()))
            again()
    return again if scratch is None and (row is not None or split == 1) else None


def _shares(
    buffers: GroupBuffers, plan: FingerprintPlan, count: int, row: int | None, stream: torch.Stream | None
) -> tuple[Tensor, int]:
    """Where the programs of a launch for so many slots sum up, and how many read a slot."""
    shared = buffers.shares is not None and (row is not None or has_long_rows(plan))
    if not shared or (split := split_of(plan, count)) == 1:
        return buffers.counters, 1
    if row is not None and buffers.shares is not None:
        return buffers.shares[row], split
    # Launches on one stream follow one another.
    device, where = buffers.clock.device, stream
    if stream is None and device.type == "cuda":
        where = triton.runtime.driver.active.get_current_stream(device.index)
    found: Tensor | None = buffers.cache.get(("shares", where))
    if found is None:
        with nullcontext() if stream is None else stream:
            found = buffers.cache["shares", where] = allocate_shares(device)[0]
    return found, split


complete_slots = functools.partial(launch, COMPLETING.value, row=COMPLETION_ROW)
baseline_slots = baseline_range = functools.partial(launch, BASELINING.value)
compare_slots = compare_range = functools.partial(launch, COMPARING.value)


def range_comparison(
    buffers: GroupBuffers, plan: FingerprintPlan, phase: Phase, stream: torch.Stream | None
) -> Callable[[range], None]:
    """Launch a comparison once for no slots, then return what launches it; see `op.range_comparison`."""

    def compare(slots: range) -> None:
        launch(COMPARING.value, buffers, plan, slots, phase, stream)

    compare(range(0))
    ready: _Ready | None = buffers.cache.get(
        ("fingerprint", COMPARING.value, phase, True, range, stream, False)
    )
    if plan.scratch is not None or ready is None or has_long_rows(plan):
        return compare
    (start,), unused = ready[1], buffers.counters.data_ptr()  # one bundle: no sums have to wait

    def launch_prepared(slots: range) -> None:
        count = len(slots)
        start((max(1, min(count, _MAX_PROGRAMS)), 1), (slots.start, count, unused, unused))

    return launch_prepared


def hash_slots(plan: FingerprintPlan, slots: Tensor) -> Tensor:
    """Launch the hash alone; see `op.hash_slots`."""
    count = slots.shape[0]
    hashes = torch.zeros((count, 2), dtype=torch.int64, device=slots.device)
    if not count or plan.num_slots is None:
        return hashes
    grid = min(count, _MAX_PROGRAMS), 1
    ready: list[Start] | None = plan.cache.get(slots.dtype)
    if ready is None:
        given = slots, count, hashes, hashes
        prepared = [_prepare_hash(plan, number, grid, given) for number in range(len(plan.bundles))]
        plan.cache[slots.dtype] = None if None in prepared else prepared
        return hashes
    for start in ready:
        start(grid, (slots.data_ptr(), count, hashes.data_ptr(), hashes.data_ptr()))
    return hashes


def _prepare_hash(
    plan: FingerprintPlan, number: int, grid: tuple[int, int], given: tuple[Tensor, int, Tensor, Tensor]
) -> Start | None:
    """Compile and launch one bundle: it reads no records, and counts nothing."""
    assert plan.num_slots is not None
    nothing = plan.bundles[number].word_keys[:1].expand(plan.num_slots)
    unused = GroupBuffers(records=nothing, counters=nothing, violations=nothing[:, None], clock=nothing)
    constants = _constants_of(plan, number, (HASH.value, Phase.TAIL, False)) | {
        "LISTED": True,
        "SPLIT": False,
    }
    return prepare(fingerprint_kernel, unused, grid, given, constants)


def _prepare(
    buffers: GroupBuffers,
    plan: FingerprintPlan,
    work: tuple[int, Phase, bool, object, torch.Stream | None, bool],
    grid: tuple[int, int],
    changing: tuple[Tensor | int, int, Tensor, Tensor],
) -> None:
    """Compile and launch each bundle; keep what launches it again.

    work = (op, phase, counted, kind, stream, split).
    """
    op, phase, counted, kind, stream, split = work
    shared = {"LISTED": kind is not range, "SPLIT": split}
    prepared = [
        prepare(
            fingerprint_kernel,
            buffers,
            grid,
            changing,
            _constants_of(plan, number, (op, phase, counted)) | shared,
            stream,
        )
        for number in range(max(1, len(plan.bundles)))
    ]
    buffers.cache["fingerprint", *work] = None if None in prepared else (plan, prepared)


def _constants_of(plan: FingerprintPlan, number: int, work: tuple[int, Phase, bool]) -> dict[str, Any]:
    """What stays the same for every launch of one bundle of a plan."""
    op, phase, counted = work
    last = number == max(1, len(plan.bundles)) - 1
    frame = {
        "OP": op, "PHASE": int(phase), "HAS_DATA": plan.coverage is not layout.RealData.NONE,
        "FIRST": number == 0, "LAST": last, "COUNTED": counted and last,
    }  # fmt: skip
    if not plan.bundles:
        nothing = torch.empty(0, dtype=torch.int64, device=plan.device)
        return frame | {
            "table": nothing, "word_keys": nothing, "num_k": 0, "num_sources": 0, **shape_of(None)
        }  # fmt: skip
    bundle = plan.bundles[number]
    return frame | {
        "table": bundle.table, "word_keys": bundle.word_keys,
        "num_k": bundle.num_k, "num_sources": len(bundle.sources), **shape_of(bundle)
    }  # fmt: skip
