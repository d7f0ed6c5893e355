"""forward_start in Triton: one program, as everything after it waits for the clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from canary_kernels import layout
from canary_kernels.forward_start import columns
from canary_kernels.launch import Start

if TYPE_CHECKING:
    from torch import Tensor

    from canary_kernels.forward_start.columns import HostColumns

TICK_BITS, RING_ROWS = tl.constexpr(layout.TICK_BITS), tl.constexpr(columns.RING_ROWS)
BLOCK, _WARPS = 512, 4


@triton.jit(
    do_not_specialize=["ticks", "size", "count", "with_rows"],
    do_not_specialize_on_alignment=["ring", "known", "rows"],
)
def start_kernel(clock, ring, known, rows, size, ticks, count, with_rows, BLOCK: tl.constexpr):
    """size: requests that the columns have room for; count: those of this forward; with_rows: 0 or 1."""
    now = tl.load(clock) + ticks
    tl.debug_barrier()  # other threads of this program may still read the clock
    tl.store(clock, now)
    given = ring + (now >> TICK_BITS) % RING_ROWS * (1 + 2 * size)
    if count > 0:
        address = tl.load(given) * with_rows
        for start in range(0, count, BLOCK):
            place = start + tl.arange(0, BLOCK)
            mask = place < count
            tl.store(known + place, tl.load(given + 1 + place, mask=mask), mask=mask)
            tl.store(known + size + place, tl.load(given + 1 + size + place, mask=mask), mask=mask)
            if address != 0:
                if address % 2 == 1:
                    wide = (address - 1).to(tl.pointer_type(tl.int64))
                    tl.store(rows + place, tl.load(wide + place, mask=mask), mask=mask)
                else:
                    narrow = address.to(tl.pointer_type(tl.int32))
                    tl.store(rows + place, tl.load(narrow + place, mask=mask).to(tl.int64), mask=mask)


# By address and device of a clock that comes without columns.
_ALONE: dict[tuple[int, int | None], Start] = {}


def start_forward(clock: Tensor, ticks: int, host: HostColumns | None, requests: int, *, rows: bool) -> None:
    """Launch; see `op.start_forward`."""
    ready = _ALONE if host is None else host.cache
    key = clock.data_ptr(), clock.device.index
    start = ready.get(key)
    if start is not None:
        start((1, 1), (ticks, requests, int(rows)))
        return
    kept = (clock,) * 4 if host is None else (clock, host.ring, host.known, host.rows)
    size = 0 if host is None else host.rows.shape[0]
    compiled = start_kernel[1, 1](*kept, size, ticks, requests, int(rows), BLOCK=BLOCK, num_warps=_WARPS)
    if hasattr(compiled, "packed_metadata"):
        addresses = *(tensor.data_ptr() for tensor in kept), size
        ready[key] = Start(compiled, clock.device, addresses, (BLOCK,))
