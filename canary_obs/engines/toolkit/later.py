"""What a scheduler knows of an output, computed once the forward that it schedules was launched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, final

T = TypeVar("T")


@final
class Later(Generic[T]):
    """Computed when it is first asked for: of a long prompt it takes longer than all else of a step.

    As a part of what is sent to another process it is computed at once, and arrives there as what it is.
    """

    __slots__ = ("_compute", "_found")

    def __init__(self, compute: Callable[[], T | None]) -> None:
        """`compute` returns None where nothing is known; it must not fail."""
        self._compute: Callable[[], T | None] | None = compute
        self._found: T | None = None

    def get(self) -> T | None:
        """The same at each call."""
        compute, self._compute = self._compute, None
        if compute is not None:
            self._found = compute()
        return self._found

    def __reduce__(self) -> tuple[Any, ...]:
        return _same, (self.get(),)


def _same(found: Any) -> Any:
    return found
