"""Copies host columns into preallocated device memory without ever waiting for the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from canary_obs.runtime.device.delayed_device_host import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    pinned: Tensor  # int64 [capacity] on the host
    on_device: Tensor  # int64 [capacity] on the device
    event: Event  # recorded after the copy out of `pinned`


class UploadRing:
    """A ring of pinned rows: unlike copies from pageable memory, theirs do not wait for the stream."""

    def __init__(
        self, capacity: int, rows: int, device: torch.device, event_factory: Callable[[], Event] | None = None
    ) -> None:
        self._on_host = device.type == "cpu" and event_factory is None
        self._rows: deque[_Row] = deque()
        if self._on_host:
            return
        on_cuda = device.type == "cuda"
        make = event_factory or partial(torch.Event, device)
        for _ in range(rows):
            self._rows.append(
                _Row(
                    pinned=torch.empty(capacity, dtype=torch.int64, pin_memory=on_cuda),
                    on_device=torch.empty(capacity, dtype=torch.int64, device=device),
                    event=make(),
                )
            )

    @property
    def ready(self) -> bool:
        """Whether `put` may be called: the last copy out of the next row is done."""
        return self._on_host or self._rows[0].event.query()

    def put(self, *columns: Tensor) -> tuple[Tensor, ...]:
        """Copy columns (int64 [n] each, on the host) to the device; valid in stream order for `rows` puts.

        Only when `ready`; together the columns have at most `capacity` elements.
        """
        if self._on_host:
            return columns
        row = self._rows[0]
        self._rows.rotate(-1)
        # NumPy on the pinned memory: a third of what torch's host copies take for columns this short.
        host, spans, stop = row.pinned.numpy(), [], 0
        for column in columns:
            start, stop = stop, stop + column.shape[0]
            host[start:stop] = column.numpy()
            spans.append((start, stop))
        row.on_device[:stop].copy_(row.pinned[:stop], non_blocking=True)
        row.event.record()
        return tuple(row.on_device[start:stop] for start, stop in spans)
