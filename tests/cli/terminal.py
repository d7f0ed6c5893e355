"""A command line on a terminal of its own, and what has been drawn on it."""

from __future__ import annotations

import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from fcntl import ioctl
from typing import Self

SECONDS = 120.0  # kernels may have to be compiled first
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """Runs `canary-obs LINE` with standard output and error on a pseudo-terminal of 160 columns."""

    def __init__(self, line: str, **environ: str) -> None:
        self._ours, theirs = pty.openpty()
        ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 160, 0, 0))
        kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "canary_obs", *line.split()],
            env=kept | {"TERM": "xterm-256color"} | environ, stdin=theirs, stdout=theirs, stderr=theirs,
        )  # fmt: skip
        os.close(theirs)
        os.set_blocking(self._ours, False)
        self._drawn = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._ours)

    def drawn(self) -> str:
        """Everything drawn so far, without colours and moves of the cursor."""
        return _ESCAPES.sub("", self.raw())

    def raw(self) -> str:
        """The same as it was written."""
        try:
            while more := os.read(self._ours, 65536):
                self._drawn += more
        except OSError:  # nothing to read now, or the program has ended
            pass
        return self._drawn.decode(errors="replace")

    def until(self, true: Callable[[str], bool]) -> str:
        """What is drawn once it is as expected; the deadline is a failure, not a wait."""
        deadline = time.monotonic() + SECONDS
        while not true(found := self.drawn()):
            assert time.monotonic() < deadline, found
            time.sleep(0.02)
        return found

    def end(self) -> int:
        """The exit code."""
        deadline = time.monotonic() + SECONDS
        while (code := self._process.poll()) is None:
            assert time.monotonic() < deadline, self.drawn()
            self.raw()  # a full terminal would stop the program
            time.sleep(0.02)
        return code
