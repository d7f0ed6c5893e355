"""Wraps a runner's forward so that an observer checks it. Where no view can be built, it runs unchecked."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from torch import Tensor

from canary_obs.engine_api.observer import Observer
from canary_obs.engine_api.views import StepView
from canary_obs.engines.toolkit.guarded import guarded
from canary_obs.engines.toolkit.shown_forward import shown_forward
from canary_obs.engines.toolkit.side_stream import SideStream
from canary_obs.reference_engine.execution.batch import ForwardBatch

Forward = Callable[[ForwardBatch], Tensor]


class ViewBuilder(NamedTuple):
    """How a batch becomes a view, in two steps."""

    build: Callable[[ForwardBatch], StepView]  # without request ids, digests and expected ids
    complete: Callable[[StepView, ForwardBatch], StepView]  # adds those


def instrumented(
    forward: Forward, view_of: Callable[[ForwardBatch], StepView], observer: Observer
) -> Forward:
    """All checks run on the forward's own stream, before and after it."""

    return shown_forward(forward, partial(guarded, observer, "step_view", view_of), observer)


def instrumented_on_side_stream(
    forward: Forward, views: ViewBuilder, observer: Observer, side_stream: SideStream
) -> Forward:
    """Only what must precede the forward is launched before it; the other checks run on a side stream.

    An engine that waits for each step's tokens would otherwise wait for the launches of all checks, too.
    """

    def observed(batch: ForwardBatch) -> Tensor:
        side_stream.join()
        view = guarded(observer, "step_view", views.build, batch)
        if view is None:
            return forward(batch)
        observer.before_write(view)
        side_stream.mark()
        try:
            logits = forward(batch)
        except BaseException:
            observer.forward_failed(view)
            raise
        check_launched(batch, view)
        return logits

    def check_launched(batch: ForwardBatch, view: StepView) -> None:
        with side_stream.after_mark:
            complete = guarded(observer, "step_view", views.complete, view, batch)
            if complete is None:
                observer.forward_failed(view)
                return
            observer.forward_launched(complete)
        with side_stream.after_all:
            observer.after_forward(complete)

    return observed
