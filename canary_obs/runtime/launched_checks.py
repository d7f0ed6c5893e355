"""What is launched at once for a forward whose batch repeats."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from canary_kernels import layout
from canary_kernels.buffers import RowBatch
from canary_kernels.fingerprint import complete_slots
from canary_kernels.verify import verify_rows
from canary_kernels.write import write_identities
from canary_obs.engine_api.launches import ForwardLaunches
from canary_obs.runtime.device.state import Group

Batches = Sequence[tuple[Group, RowBatch]]


def launch_checks(
    batches: Batches, launches: ForwardLaunches | None, start: Callable[[], None] | None = None
) -> None:
    """Head and tail of a forward at once, of groups without a layer to compare; `start` first."""
    if start is not None:
        start()
    if launches is not None and launches.head is not None:
        launches.head()
    for group, batch in batches:
        group.first_positions.compute(batch.prefix_lens)
        write_identities(group.backend, group.buffers, batch)
        verify_rows(group.backend, group.buffers, batch, layout.Phase.HEAD)
    for group, batch in batches:
        complete_slots(group.backend, group.buffers, group.plan, batch.out_slots)
        verify_rows(group.backend, group.buffers, batch, layout.Phase.TAIL)
