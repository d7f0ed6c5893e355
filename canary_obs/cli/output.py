"""What commands print. A failed write is an OSError, which canary_obs.cli.run reports in one line."""

from __future__ import annotations

import errno
import os
import sys

from rich.console import Console, RenderableType
from rich.table import Column

_WIDE = 200  # columns where nobody looks: in a pipe a cut or broken row is worth nothing


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


def print_table(content: RenderableType) -> None:
    """The same for a table of many columns: wide enough where standard output is no terminal."""
    terminal = sys.stdout is not None and sys.stdout.isatty()
    print_rich(content, width=None if terminal or "COLUMNS" in os.environ else _WIDE)


def id_column(header: str) -> Column:
    """A column of ids, which are arguments of other commands: where it is narrow, the others wrap."""
    return Column(header, no_wrap=True)


def note(text: str) -> None:
    """A line on standard error, where progress goes. One that cannot be written is lost."""
    if sys.stderr is not None:
        try:
            sys.stderr.write(text + "\n")
            sys.stderr.flush()
        except (OSError, ValueError):
            return
