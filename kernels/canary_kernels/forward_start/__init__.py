"""Set the clock of a forward, and take over what the host gives the device with it."""

from canary_kernels.forward_start.columns import RING_ROWS, HostColumns
from canary_kernels.forward_start.op import start_forward

__all__ = ["RING_ROWS", "HostColumns", "start_forward"]
