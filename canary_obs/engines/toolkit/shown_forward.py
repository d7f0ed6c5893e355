"""A forward that an observer is shown, on the forward's own stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from canary_obs.engine_api.observer import Observer
from canary_obs.engine_api.views import StepView


def shown_forward(
    forward: Callable[..., Any], view_of: Callable[[Any], StepView | None], observer: Observer
) -> Callable[..., Any]:
    """`forward` of a batch, with all checks before and after it; unchecked where `view_of` gives None."""

    def observed(batch: Any, *args: Any, **kwargs: Any) -> Any:
        view = view_of(batch)
        if view is None:
            return forward(batch, *args, **kwargs)
        observer.before_forward(view)
        try:
            result = forward(batch, *args, **kwargs)
        except BaseException:
            observer.forward_failed(view)
            raise
        observer.after_forward(view)
        return result

    return observed
