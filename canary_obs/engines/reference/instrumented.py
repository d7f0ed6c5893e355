"""A runner's forward inside the observer. One that cannot be shown is reported, and runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from canary_obs.engine_api.observer import Observer
from canary_obs.engine_api.views import StepView
from canary_obs.engines.toolkit.side_stream import SideStream
from canary_obs.reference_engine.execution.batch import ForwardBatch

Forward = Callable[[ForwardBatch], Tensor]


class Views(NamedTuple):
    """How a forward becomes a view, in two parts."""

    plain: Callable[[ForwardBatch], StepView]  # without request ids, digests and expected ids
    complete: Callable[[StepView, ForwardBatch], StepView]


def instrumented(
    forward: Forward, view_of: Callable[[ForwardBatch], StepView], observer: Observer
) -> Forward:
    """Checks before and after the forward, on the engine's stream."""

    def observed(batch: ForwardBatch) -> Tensor:
        try:
            view = view_of(batch)
        except Exception as error:  # noqa: BLE001 - a fault of the observer's side must not reach the engine
            observer.fault("step_view", error)
            return forward(batch)
        observer.before_forward(view)
        try:
            logits = forward(batch)
        except BaseException:
            observer.forward_failed(view)
            raise
        observer.after_forward(view)
        return logits

    return observed


def instrumented_on_side_stream(
    forward: Forward, views: Views, observer: Observer, side_stream: SideStream
) -> Forward:
    """Only what must precede the forward is launched ahead of it; the rest while it runs, beside its stream.

    An engine that waits for each step's tokens otherwise waits for the launches of all checks as well.
    """

    def observed(batch: ForwardBatch) -> Tensor:
        side_stream.join()
        try:
            view = views.plain(batch)
        except Exception as error:  # noqa: BLE001 - a fault of the observer's side must not reach the engine
            observer.fault("step_view", error)
            return forward(batch)
        observer.before_write(view)
        side_stream.mark()
        try:
            logits = forward(batch)
        except BaseException:
            observer.forward_failed(view)
            raise
        _look(batch, view)
        return logits

    def _look(batch: ForwardBatch, view: StepView) -> None:
        with side_stream.after_mark:
            try:
                view = views.complete(view, batch)
            except Exception as error:  # noqa: BLE001 - as above
                observer.forward_failed(view)
                observer.fault("step_view", error)
                return
            observer.forward_launched(view)
        with side_stream.after_all:
            observer.after_forward(view)

    return observed
