"""How much of a heavy test the everyday suite runs; `make test-slow` runs the whole of it."""

from __future__ import annotations

import os

WHOLE = "CANARY_TESTS_WHOLE"  # the environment variable that asks for it


def sized(whole: int, everyday: int) -> int:
    """Examples or steps of a test."""
    return whole if os.environ.get(WHOLE) else everyday
