"""Replaced attributes, remembered so that they can be put back exactly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_ABSENT = object()


class MethodPatches:
    """Wraps methods of classes or instances; `restore` undoes all, last first."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any]] = []

    def wrap(self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Put make(original) in the place of owner's method `name`."""
        self._replaced.append((owner, name, vars(owner).get(name, _ABSENT)))
        wrapper = make(getattr(owner, name))
        wrapper.__name__ = name
        setattr(owner, name, wrapper)

    def restore(self) -> None:
        """Put everything back; idempotent."""
        while self._replaced:
            owner, name, original = self._replaced.pop()
            if original is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
