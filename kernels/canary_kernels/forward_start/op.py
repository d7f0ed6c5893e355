"""Entry point of forward_start: the clock of a forward, and the columns that the host gives with it."""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING

from canary_kernels.checks import Backend, KernelArgumentError
from canary_kernels.forward_start import reference

if TYPE_CHECKING:
    from types import ModuleType

    from torch import Tensor

    from canary_kernels.forward_start.columns import HostColumns


@functools.cache
def _kernel() -> ModuleType:
    """Triton is imported on first use."""
    return importlib.import_module("canary_kernels.forward_start.kernel")


def start_forward(
    backend: Backend, clock: Tensor, ticks: int, host: HostColumns | None = None, requests: int = 0,
    *, rows: bool = True,
) -> None:  # fmt: skip
    """Add ticks to the clock (int64 [1]), then take the columns of that forward for so many requests.

    The forward's number is the clock's step, which chooses the row of the ring. An address of 0 there, or
    rows=False, leaves `host.rows` as it is. One launch. Raises KernelArgumentError for more requests than the
    columns have room for.
    """
    if host is not None and requests > host.rows.shape[0]:
        raise KernelArgumentError(
            f"a forward of {requests} requests; the rule is at most {host.rows.shape[0]}; "
            "allocate for the most that the engine runs together"
        )
    if backend is Backend.TRITON:
        _kernel().start_forward(clock, ticks, host, requests, rows=rows)
    else:
        reference.start_forward(clock, ticks, host, requests, rows=rows)
