"""Arrivals on the CPU, on the tensors' own memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from canary_kernels import layout
from canary_kernels.arrival.columns import ARRIVAL_WORDS, Arrival, Edge, Unchanged
from canary_kernels.layout import (
    COUNT_HASHED,
    COUNT_LOADS_COMPARED,
    COUNT_LOADS_LEFT_OUT,
    COUNT_UNHASHED,
    NO_REQUEST,
    Part,
    Phase,
    Reason,
)
from canary_kernels.violations import report_where

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from canary_kernels.arrival.load import ArrivedLoad
    from canary_kernels.buffers import GroupBuffers
    from canary_kernels.hashing import Integers

_STATE_SHIFT, _POSITION_SHIFT = 32, 32 + layout.STATE_BITS


def judge_arrivals(buffers: GroupBuffers, blocks: Tensor, sent: Tensor) -> Tensor:
    """Compare, report and count; see `op.judge_arrivals`."""
    columns, copies, counters = blocks.numpy(), sent.numpy(), buffers.counters.numpy()
    now = columns[:, None, Arrival.NOW_K :]
    given = np.arange(copies.shape[1]) < columns[:, Arrival.COPIES, None]
    equal = (copies == now) & given[:, :, None]
    matched, each = equal.all(2).any(1), equal.any(1)
    known = given.any(1)
    # Parts of two different copies: each is right by itself, and K is named for both.
    each[:, 0] &= ~each.all(1) | matched
    for part in (Part.K, Part.V):
        unchanged = columns[:, Arrival.UNCHANGED_K + part - 1]
        wrong = known & ~matched & ~each[:, part - 1]
        lost = (wrong & (unchanged != Unchanged.CHANGED)) | (~known & (unchanged == Unchanged.REPLACED))
        actual = columns[:, Arrival.NOW_K + part - 1]
        expected = np.where(known, copies[:, 0, part - 1] if copies.shape[1] else 0, actual)
        facts = columns[:, Arrival.SLOT], columns[:, Arrival.POSITION], NO_REQUEST, expected, actual
        report_where(buffers, (Phase.HEAD, Reason.LOST_LOAD, part), lost, facts)
        report_where(buffers, (Phase.HEAD, Reason.KV_DATA, part), wrong & ~lost, facts)
    slots = columns[:, Arrival.SLOTS]
    compared = int(slots[known].sum())
    left_out = int(slots.sum()) - compared
    for counter, amount in (
        (COUNT_HASHED + Phase.HEAD, compared), (COUNT_LOADS_COMPARED, compared),
        (COUNT_UNHASHED + Phase.HEAD, left_out), (COUNT_LOADS_LEFT_OUT, left_out),
    ):  # fmt: skip
        counters[counter] += amount
    return torch.from_numpy(matched.astype(np.int64))


def weigh_arrivals(_buffers: GroupBuffers, load: ArrivedLoad) -> Tensor:
    """Fold what the blocks hold, and compare it with before; see `op.weigh_arrivals`."""
    slots, now, edges = load.slots.numpy(), load.now.numpy(), load.edges.numpy()
    identity = load.identities.numpy()[:, :, 0]
    first, stop, copies, filled = edges.T
    within, known = _within(edges, slots.shape[1]), copies > 0
    compared = np.where(known[:, None], np.arange(slots.shape[1]) < filled[:, None], within)
    blocks = np.empty((slots.shape[0], ARRIVAL_WORDS), dtype=np.int64)
    blocks[:, Arrival.SLOT], blocks[:, Arrival.POSITION] = slots[:, 0], _positions(identity[:, 0])
    blocks[:, Arrival.SLOTS] = np.where(known, filled, np.maximum(stop - first, 0))
    blocks[:, Arrival.COPIES] = copies
    unchanged = _unchanged(load.old.numpy(), identity, now, within)
    blocks[:, Arrival.UNCHANGED_K : Arrival.NOW_K] = unchanged * load.held.numpy()
    keys = np.where(compared, load.keys.numpy(), 0)
    blocks[:, Arrival.NOW_K :] = (now * keys[:, :, None]).sum(1)
    return torch.from_numpy(blocks)


def keep_arrivals(buffers: GroupBuffers, load: ArrivedLoad, matched: Tensor) -> None:
    """Store the records of what has arrived; see `op.keep_arrivals`."""
    slots, edges = load.slots.numpy(), load.edges.numpy()
    slots[~_within(edges, slots.shape[1])] = -1
    identity, chain = np.moveaxis(load.identities.numpy(), -1, 0)
    baseline = identity ^ layout.COMPLETE_TO_BASELINE
    identity = np.where(matched.numpy()[:, None] != 0, identity, baseline)
    records = np.concatenate((np.stack((identity, chain), -1), load.now.numpy()), -1)
    held = (slots >= 0) & (slots < buffers.num_slots)
    buffers.records.numpy()[slots[held]] = records[held]


def fold_records(buffers: GroupBuffers, slots: Tensor, keys: Tensor, *, baselines: bool) -> Tensor:
    """Fold what records say of blocks; see `op.fold_records`."""
    numbers, records = slots.numpy(), buffers.records.numpy()
    filled, held = numbers >= 0, (numbers >= 0) & (numbers < buffers.num_slots)
    found = records[np.where(held, numbers, 0)]
    state = found[:, :, layout.IDENTITY] >> _STATE_SHIFT & layout.STATE_MASK
    whole = state == layout.RecordState.COMPLETE
    if baselines:
        whole |= state == layout.RecordState.BASELINE
    complete = held & whole
    folds = np.empty((numbers.shape[0], 3), dtype=np.int64)
    folds[:, 0] = (complete | ~filled).all(1) & filled.any(1)
    used = np.where(held, keys.numpy(), 0)
    folds[:, 1:] = (found[:, :, layout.FINGERPRINT_K :] * used[:, :, None]).sum(1)
    return torch.from_numpy(folds)


def _within(edges: Integers, size: int) -> NDArray[np.bool_]:
    """bool [blocks, size]: the slots that have arrived."""
    offsets = np.arange(size)
    return (offsets >= edges[:, Edge.FIRST, None]) & (offsets < edges[:, Edge.STOP, None])


def _positions(identities: Integers) -> Integers:
    return identities >> _POSITION_SHIFT & layout.MAX_POSITION


def _unchanged(
    old: Integers, identity: Integers, now: Integers, within: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """int64 [blocks, 2] of `Unchanged`: of each block and part, from its slots `within`."""
    state = old[:, :, layout.IDENTITY] >> _STATE_SHIFT & layout.STATE_MASK
    complete = state == layout.RecordState.COMPLETE
    # A baseline of bytes that were loaded has an identity, one that was taken of unknown bytes has no chain.
    baseline = state == layout.RecordState.BASELINE
    named = complete | (baseline & (old[:, :, layout.CHAIN] != 0))
    differing = old[:, :, layout.IDENTITY] ^ identity
    token = (differing & layout.TOKEN_MASK) != 0
    position = _positions(differing) != 0
    # V does not depend on the position in every model; a token alone may rightly leave zeros.
    replaced = np.stack((named & (token | position), named & token), -1)
    known = (complete | baseline)[:, :, None]
    zero = (now == 0) & ~known & (_positions(identity) > 0)[:, :, None]
    same = (known & (now == old[:, :, layout.FINGERPRINT_K :])) | zero
    inside = within[:, :, None]
    left = (same | ~known | ~inside).all(1) & (same & inside).any(1)
    wrong = (same & inside & (replaced | zero)).any(1)
    code = np.where(wrong, int(Unchanged.REPLACED), int(Unchanged.SAME))
    return np.where(left, code, int(Unchanged.CHANGED))
