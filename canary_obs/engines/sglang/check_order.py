"""When what comes between forwards is launched, among the checks of an engine."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol


class CheckOrder(Protocol):
    """The checks of an engine, on streams of its device if it is a GPU."""

    def in_order(self) -> AbstractContextManager[None]:
        """Launches inside follow all checks so far, and what the current stream was given."""

    def precede(self) -> None:
        """What the current stream is given next follows all checks so far."""
