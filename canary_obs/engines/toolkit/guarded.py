"""Calls out of an engine's own methods, which must go on whatever the canary does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from canary_obs.engine_api.observer import Observer
from canary_obs.errors import KVCacheViolation


def guarded(observer: Observer, part: str, act: Callable[..., Any], *arguments: Any) -> Any:
    """What the call returns; None when it failed, which counts as a fault of this part.

    Raises KVCacheViolation in mode `raise`: damaged KV must not be used.
    """
    try:
        return act(*arguments)
    except KVCacheViolation:
        raise
    except Exception as error:  # noqa: BLE001 - a fault of the canary must not reach the engine
        observer.fault(part, error)
        return None
