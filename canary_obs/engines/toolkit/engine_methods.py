"""Checks that an engine has the methods that an adapter wraps or calls, before anything is changed."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib import import_module

from canary_obs.errors import UnsupportedEngine

Hooks = Mapping[str, Mapping[str, tuple[str, ...]]]  # module:class -> method -> its first parameters


def check_methods(engine: str, hooks: Hooks) -> None:
    """Raises UnsupportedEngine when a method of `engine` is missing or has other parameters after self."""
    for path, methods in hooks.items():
        for method, wanted in methods.items():
            owner = find_class(path, method)
            found = tuple(inspect.signature(getattr(owner, method)).parameters)[1:] if owner else None
            if found is None or found[: len(wanted)] != wanted:
                raise UnsupportedEngine(
                    f"{engine}'s {path}.{method} has parameters {found}, expected {wanted} first; "
                    f"this build of {engine} differs from the supported ones, use a newer canary_obs"
                )


def find_class(path: str, method: str) -> type | None:
    """The class `module:name`; None when it cannot be imported or lacks the method."""
    module, name = path.split(":")
    try:
        owner: type | None = getattr(import_module(module), name, None)
    except ImportError:
        return None
    return owner if hasattr(owner, method) else None
