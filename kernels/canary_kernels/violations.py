"""How the references append to the violation log: the same rows and counters as the kernels' `report`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from canary_kernels.layout import (
    COUNT_VIOLATIONS,
    ROW_EVENT,
    ROW_STEP,
    Part,
    Phase,
    Reason,
    lane,
)

if TYPE_CHECKING:
    from torch import Tensor

    from canary_kernels.buffers import GroupBuffers


def report(buffers: GroupBuffers, phase: Phase, reason: Reason, rows: Tensor) -> None:
    """Count and log rows (int64 [n, 6]: slot, position, request, part, expected, actual).

    A log row is written at most once per step, by the first event that maps to it; row 0 holds event 0.
    """
    if rows.shape[0] == 0:
        return
    index = lane(phase, reason)
    log, counter = buffers.violations[index], buffers.counters[COUNT_VIOLATIONS + index]
    latest = log.shape[0] - 1
    first, step = int(counter), int(buffers.clock[0])
    counter += rows.shape[0]
    # Later rows of this call would wrap onto its own earlier ones.
    rows = rows[: latest + (first == 0)]
    events = torch.arange(first, first + rows.shape[0])
    places = torch.where(events == 0, 0, 1 + (events - 1) % latest)
    held = log[places]
    free = (held[:, ROW_STEP] != step) | (held[:, ROW_EVENT] == 0)
    stamps = torch.stack([events + 1, torch.full_like(events, step)], 1)
    log[places[free]] = torch.cat([stamps, rows], 1)[free]


def rows_of(mask: Tensor, request: Tensor | int, part: Part, *columns: Tensor) -> Tensor:
    """int64 [n, 6]: log rows where mask holds, from columns slot, position, expected, actual."""
    slot, position, expected, actual = (column.expand_as(mask)[mask] for column in columns)
    requests = request[mask] if isinstance(request, torch.Tensor) else torch.full_like(slot, request)
    return torch.stack([slot, position, requests, torch.full_like(slot, int(part)), expected, actual], 1)
