"""forward_start on the CPU, where every address is the host's own."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np

from canary_kernels.layout import TICK_BITS

if TYPE_CHECKING:
    from torch import Tensor

    from canary_kernels.forward_start.columns import HostColumns


def start_forward(clock: Tensor, ticks: int, host: HostColumns | None, requests: int, *, rows: bool) -> None:
    """See `op.start_forward`."""
    value = clock.numpy()
    value += ticks
    if host is None or not requests:
        return
    address, known = host.row(int(value[0]) >> TICK_BITS)
    host.known.numpy()[:, :requests] = known[:, :requests]
    if rows and (start := int(address[0])):
        kind = ctypes.c_int64 if start & 1 else ctypes.c_int32
        host.rows.numpy()[:requests] = np.ctypeslib.as_array((kind * requests).from_address(start & ~1))
