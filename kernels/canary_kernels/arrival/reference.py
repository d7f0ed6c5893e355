"""Arrivals on the CPU, on the tensors' own memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from canary_kernels.arrival.columns import Arrival, Unchanged
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
    from torch import Tensor

    from canary_kernels.buffers import GroupBuffers


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
