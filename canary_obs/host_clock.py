"""Which start of which kernel this process runs under."""

from __future__ import annotations

import functools
from pathlib import Path

_FILE = Path("/proc/sys/kernel/random/boot_id")


@functools.cache
def boot_id() -> str | None:
    """Processes with the same one have the same monotonic clock; None = unknown."""
    try:
        return _FILE.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
