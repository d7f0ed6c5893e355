"""What commands print. A failed write is an OSError, which canary_obs.cli.run reports in one line."""

from __future__ import annotations

import errno
import os
import sys

from rich.console import Console, RenderableType


def write_out(text: str) -> None:
    """Write to standard output at once. Raises OSError."""
    if sys.stdout is None:  # closed by who started the command
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    sys.stdout.write(text)
    sys.stdout.flush()


def print_rich(content: RenderableType, *, width: int | None = None) -> None:
    """Print a table or marked-up text to standard output, as wide as the terminal is. Raises OSError."""
    console = Console(width=width)
    # Not printed by rich, which ends the process on a closed pipe.
    with console.capture() as captured:
        console.print(content)
    write_out(captured.get())
