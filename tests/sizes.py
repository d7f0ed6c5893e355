"""How much of a heavy test the everyday suite runs; `make test-slow` runs the whole of it."""

from __future__ import annotations

import os
from typing import TypeVar

_T = TypeVar("_T")
WHOLE = "CANARY_TESTS_WHOLE"  # the environment variable that asks for it


def sized(whole: _T, everyday: _T) -> _T:
    """Examples, steps or cases of a test."""
    return whole if os.environ.get(WHOLE) else everyday
