"""What an adapter has the canary launch with the checks of a forward, which launches all of it as one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from canary_kernels.forward_start import HostColumns


@dataclass(slots=True, kw_only=True)
class ForwardLaunches:
    """The same object for every forward whose launches read and write the same memory.

    A launch may be captured as a CUDA graph and replayed: it allocates nothing, waits for nothing, and takes
    what changes from device memory. A canary that is not ready calls none of them.
    """

    host: HostColumns
    stage: Callable[[int], None]  # fills the row of the ring for the forward of this number
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
