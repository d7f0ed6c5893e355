"""The canary's hooks in a scheduler whose forwards run on a CUDA stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from canary_obs.engine_api.observer import Observer
from canary_obs.engine_api.views import StepView
from canary_obs.engines.sglang.step_hooks import StepHooks, ViewSource
from canary_obs.engines.toolkit.forward_stream import ForwardStream
from canary_obs.engines.toolkit.side_stream import SideStream


class StreamHooks(StepHooks):
    """Checks next to the forward, on a stream of their own:

        forward is called           join the side stream; before_write, on the forward's stream
        forward returns             forward_launched and after_forward, on the side stream
        run_batch returns           after_step, on the side stream

    SGLang's forward is launched by then, not ended: a captured graph in a decode. What is launched next joins
    the side stream before it changes anything read there; idle work runs on the scheduler's stream. Of a view
    like the last one, which is soon launched as one (`Replays`), both checks wait for the forward.
    """

    def __init__(
        self,
        scheduler: Any,
        views: ViewSource,
        observer: Observer,
        streams: tuple[ForwardStream, SideStream, ForwardStream],
    ) -> None:
        """`streams`: of the forwards, of the checks, of the scheduler."""
        super().__init__(scheduler, views, observer)
        self._forward_stream, self._side_stream, self._scheduler_stream = streams
        # The tensors of a batch end with its view, whose checks may still read them: with the view after the
        # next one they are over.
        self._kept: tuple[StepView | None, StepView | None] = (None, None)

    @property
    def under_way(self) -> bool:
        """Whether a batch is under way, on the host or on the device."""
        return self.launching or self._forward_stream.busy

    def stop(self) -> None:
        """What follows on the scheduler's stream waits for the checks."""
        self._side_stream.join()

    def end_step(self) -> None:
        """The batch was launched. The side stream waits for its forward already."""
        self._observer.after_step(self._side_stream.unordered)

    def idle(self) -> bool:
        """Work after everything on the side stream."""
        self._side_stream.join()
        return self._observer.idle()

    def around_run_batch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps the scheduler's `run_batch`, which is called on its stream."""
        run_shown = super().around_run_batch(original)

        def run_batch(batch: Any, *args: Any, **kwargs: Any) -> Any:
            self._scheduler_stream.remember()
            return run_shown(batch, *args, **kwargs)

        return run_batch

    def around_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps the model runner's `forward`."""
        observer, side_stream = self._observer, self._side_stream

        def forward(forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
            if forward_batch.forward_mode.is_idle():
                return original(forward_batch, *args, **kwargs)
            self._forward_stream.remember()
            side_stream.join()
            view = self._view(forward_batch)
            if view is None:
                result = original(forward_batch, *args, **kwargs)
                with side_stream.after_all:  # a baseline of any slot must not precede what it writes
                    return result
            repeated, self._kept = view is self._kept[1], (self._kept[1], view)
            observer.before_write(view)
            if not repeated:
                side_stream.mark()
            try:
                result = original(forward_batch, *args, **kwargs)
            except BaseException:
                observer.forward_failed(view)
                raise
            if repeated:
                with side_stream.after_all:
                    observer.forward_launched(view)
                    observer.after_forward(view)
                return result
            side_stream.launched()
            with side_stream.after_mark:
                observer.forward_launched(view)
                side_stream.wait_launched()
                observer.after_forward(view)
            return result

        return forward
