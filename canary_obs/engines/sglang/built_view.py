"""Builds the view of a batch for the hooks, and counts the time."""

from __future__ import annotations

import time
from collections.abc import Callable

from canary_obs.engine_api.observer import Observer
from canary_obs.engine_api.views import StepView


def built_view(build: Callable[[], StepView], observer: Observer) -> StepView | None:
    """None when building it failed, which is reported: the forward is then one that was not shown."""
    started = time.perf_counter()
    try:
        return build()
    except Exception as error:  # noqa: BLE001 - a fault of the canary must not reach the engine
        observer.fault("step_view", error)
        return None
    finally:
        observer.overhead["adapter"] += time.perf_counter() - started
