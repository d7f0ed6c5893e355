"""How the references append to the violation log: the same rows and counters as the kernels' `report`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from canary_kernels.layout import (
    COUNT_VIOLATIONS,
    ROW_EVENT,
    ROW_SLOT,
    ROW_STEP,
    Part,
    Phase,
    Reason,
    lane,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from canary_kernels.buffers import GroupBuffers
    from canary_kernels.hashing import Integers


def report(buffers: GroupBuffers, phase: Phase, reason: Reason, columns: Sequence[Integers]) -> None:
    """Count and log violations: columns slot, position, request, part, expected, actual.

    A log row is written at most once per step, by the first event that maps to it; row 0 holds event 0.
    """
    rows = np.stack(columns, 1)
    index = lane(phase, reason)
    log, counters = buffers.violations[index].numpy(), buffers.counters.numpy()
    latest = log.shape[0] - 1
    first, step = int(counters[COUNT_VIOLATIONS + index]), int(buffers.clock[0])
    counters[COUNT_VIOLATIONS + index] += rows.shape[0]
    # Later rows of this call would wrap onto its own earlier ones.
    rows = rows[: latest + (first == 0)]
    events = np.arange(first, first + rows.shape[0])
    places = np.where(events == 0, 0, 1 + (events - 1) % latest)
    free = (log[places, ROW_STEP] != step) | (log[places, ROW_EVENT] == 0)
    places = places[free]
    log[places, ROW_EVENT] = events[free] + 1
    log[places, ROW_STEP] = step
    log[places, ROW_SLOT:] = rows[free]


def report_where(
    buffers: GroupBuffers,
    check: tuple[Phase, Reason, Part],
    mask: NDArray[np.bool_],
    columns: Sequence[Integers | int],
) -> None:
    """Report the elements where mask holds: columns slot, position, request, expected, actual, or scalars."""
    if not mask.any():
        return
    phase, reason, part = check
    picked = [np.broadcast_to(column, mask.shape)[mask] for column in columns]
    part_column = np.full_like(picked[0], int(part))
    report(buffers, phase, reason, [*picked[:3], part_column, *picked[3:]])
