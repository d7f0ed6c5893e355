"""Attributes that are replaced, and can be restored exactly."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

_ABSENT = object()


class MethodPatches:
    """Replaces attributes of classes or instances; `restore` undoes all, last first."""

    # wrapt was considered: it wraps, but has no undo. Setting a method back to its `__wrapped__` leaves a
    # bound method in the instance's __dict__, and detach must leave the engine exactly as it was.

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any]] = []

    def wrap(self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace owner's method `name` by make(original)."""
        wrapper = make(getattr(owner, name))
        wrapper.__name__ = name
        self.set(owner, name, wrapper)

    def wrap_own(
        self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        """Wrap a method of one instance by `make` for its class's method, which is given the instance."""

        def make_own(original: Callable[..., Any]) -> Callable[..., Any]:
            if isinstance(original, MethodType) and original.__self__ is owner:
                return partial(make(original.__func__), owner)  # a call less than what follows
            return partial(make(lambda _, *given, **named: original(*given, **named)), owner)

        self.wrap(owner, name, make_own)

    def set(self, owner: Any, name: str, value: object) -> None:
        """Set owner's attribute `name`; it need not exist."""
        self._replaced.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)

    def restore(self) -> None:
        """Restore every attribute; idempotent."""
        while self._replaced:
            owner, name, original = self._replaced.pop()
            if original is not _ABSENT:
                setattr(owner, name, original)
            elif name in vars(owner):  # not when another tool has removed it since
                delattr(owner, name)
