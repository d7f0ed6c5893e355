"""What an adapter has the canary launch with the checks of a forward, which launches all of it as one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from canary_kernels.forward_start import HostColumns

FEW_TOKENS = 16  # of a request: one, or with what was drafted; a forward of more hardly repeats


@dataclass(slots=True, kw_only=True)
class ForwardLaunches:
    """The same object for every forward whose launches read and write the same memory.

    A launch may be captured as a CUDA graph and replayed: it allocates nothing, waits for nothing, and takes
    what changes from device memory. A canary that is not ready calls none of them.
    """

    host: HostColumns
    # Fills the row of the ring for the forward of this number. What it returns, if not None, fills the rest
    # of it, and is called once the forward was launched: then `host` is taken once more.
    stage: Callable[[int], Callable[[], None] | None]
    before_write: Callable[[], None] | None = None  # after `host` was taken, before bytes are compared
    head: Callable[[], None] | None = None  # before identities are written
    # Set by the adapter for each forward, cleared as `head` is launched: it launches what was left out.
    due: bool = False

    def launch_head(self) -> None:
        """Launch `head`, of a forward that this was not done for."""
        if self.due:
            self.due = False
            if self.head is not None:
                self.head()
