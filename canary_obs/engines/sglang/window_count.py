"""Counts of a model with sliding windows, for the divergence report, made on the device without waiting."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from canary_obs.engine_api.views import WindowTokens
from canary_obs.engines.sglang.groups import FULL, SWA
from canary_obs.engines.toolkit.forward_stream import ForwardStream


class _Coming(NamedTuple):
    """A count on its way from the device."""

    live: int  # slots that the full layers' allocator has given away
    counts: Tensor  # int64 [2]: of those, with a slot in the window group, and with another number there
    arrived: torch.Event | None  # None on a CPU


class WindowCount:
    """One count at a time, in order with what the scheduler launches."""

    def __init__(self, mapping: Tensor, full: Any, scheduler: ForwardStream) -> None:
        """`mapping`: SGLang's own, of full slots, 0 = no other slot; `full`: the allocator of full slots."""
        self._mapping, self._full, self._scheduler = mapping, full, scheduler
        self._coming: _Coming | None = None

    def newest(self, *, wait: bool) -> WindowTokens | None:
        """None = it is under way, and will be there at a later call; `wait`: for the device instead."""
        coming, self._coming = self._coming or self._start(), None
        if coming.arrived is not None and wait:
            coming.arrived.synchronize()
        elif coming.arrived is not None and not coming.arrived.query():
            self._coming = coming
            return None
        mapped, diverging = coming.counts.tolist()
        missing = coming.live - mapped
        return WindowTokens(full=(FULL,), windowed=(SWA,), out_of_window=missing, diverging=diverging)

    def _start(self) -> _Coming:
        mapping, device = self._mapping[:-1], self._mapping.device  # the last place stands for -1
        with self._scheduler.entered():
            mapped = mapping > 0
            other = mapped & (mapping != torch.arange(mapping.shape[0], device=device))
            found = torch.stack((mapped.sum(), other.sum()))
            live = int(self._full.size) - int(self._full.available_size())
            if device.type == "cpu":
                return _Coming(live, found, None)
            counts = torch.empty(2, dtype=torch.int64, pin_memory=True)
            counts.copy_(found, non_blocking=True)
            arrived = torch.Event(device)
            arrived.record()
        return _Coming(live, counts, arrived)
