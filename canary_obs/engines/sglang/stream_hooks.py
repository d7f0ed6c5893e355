"""The canary's hooks in a scheduler whose forwards run on a CUDA stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from canary_obs.engine_api.observer import Observer
from canary_obs.engine_api.views import StepView
from canary_obs.engines.sglang.built_view import built_view
from canary_obs.engines.sglang.prefix_hits import PrefixHits
from canary_obs.engines.sglang.step_hooks import StepHooks
from canary_obs.engines.toolkit.check_stream import CheckStream
from canary_obs.engines.toolkit.early_stream import EarlyStream
from canary_obs.engines.toolkit.forward_stream import ForwardStream
from canary_obs.engines.toolkit.guarded import guarded
from canary_obs.engines.toolkit.side_stream import SideStream


class Streams(NamedTuple):
    """Streams of one engine."""

    forward: ForwardStream
    side: SideStream
    scheduler: ForwardStream
    early: EarlyStream


def streams_of(device: torch.device, scheduler: ForwardStream) -> Streams:
    """New ones, with the stream of an engine's scheduler."""
    forward, side = ForwardStream(device), SideStream(device, enabled=True)
    return Streams(forward, side, scheduler, EarlyStream(device, scheduler, (forward, side)))


class RepeatingViews(Protocol):
    """Builds the view of a forward; batches that decode the same requests have the same view."""

    def repeats(self, batch: Any, requests: Sequence[Any]) -> bool:
        """Whether the batch has the last view."""

    def build(self, batch: Any, requests: Sequence[Any], *, late: bool = False) -> StepView:
        """Of a forward batch and the scheduler's requests in it; `late`: values follow with `keep_late`."""

    @property
    def late_slots(self) -> Tensor:
        """Where the forward of the view that was built with `late` will write."""

    def keep_late(self) -> None:
        """Give the view's tensors the values of its batch, unless they have them."""


class StreamHooks(StepHooks):
    """Checks next to the forward, in one of three ways:

        next to   join the side stream; before_write, on the forward's stream; the forward; then, on the side
                  stream, forward_launched and after_forward. Of prompts the view has its values after the
                  launch only: to put them together takes the host longer than all else that precedes it
        in line   all of it on the forward's stream, where the device waits for its host (CheckStream)
        early     before_write on the early stream, while the forward before still runs, so that nothing comes
                  between the two; the rest as next to it. Of batches that repeat the last one

    What follows a forward, which is launched when it returns and not ended, joins the side stream before it
    changes anything read there. after_step and idle work follow the checks.
    """

    def __init__(
        self,
        scheduler: Any,
        views: RepeatingViews,
        observer: Observer,
        streams: Streams,
        hits: PrefixHits | None = None,
    ) -> None:
        """`hits`: None = prefix hits are not compared."""
        super().__init__(scheduler, views, observer, hits=hits)
        self._device_views, self._streams = views, streams
        self.arrive: Callable[[], None] = _nothing  # compares what was loaded from the host
        self._chosen = CheckStream(streams.forward, streams.side)
        # The tensors of a batch end with its view, whose checks may still read them: with the view after the
        # next one they are over.
        self._kept: tuple[StepView | None, StepView | None] = (None, None)
        self._next_to_in_a_row = 0  # forwards in a row whose checks are on the side stream
        self._entries = 0  # of the side stream, after the last of them

    @property
    def under_way(self) -> bool:
        """Whether a batch is under way, on the host or on the device."""
        return self.launching or self._streams.forward.busy

    def stop(self) -> None:
        """What follows on the scheduler's stream waits for the checks."""
        self._streams.side.join()
        self._streams.forward.join()

    @contextmanager
    def in_order(self) -> Iterator[None]:
        """Launches inside follow all checks so far, and what the current stream was given."""
        self._chosen.join_due = True
        with self._streams.side.after_all:
            self._streams.forward.join()  # where checks in line are
            yield

    def precede(self) -> None:
        """What the current stream is given next follows all checks so far."""
        self._streams.side.join()

    def record(self, side: torch.Event, line: torch.Event) -> None:
        """The events happen when all checks so far are over, on either stream."""
        self._streams.side.record(side)
        self._streams.forward.record(line)

    def end_step(self) -> None:
        """The batch was launched. Either stream waits for its forward already."""
        forward, side = self._streams.forward, self._streams.side
        self._observer.after_step(forward.on_stream if self._chosen.in_line else side.unordered)

    def idle(self) -> bool:
        """Work after everything on the side stream and that of the forwards."""
        self.stop()
        self.arrive()
        return self._observer.idle()

    def around_run_batch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps the scheduler's `run_batch`, which is called on its stream."""
        run_shown = super().around_run_batch(original)

        def run_batch(batch: Any, *args: Any, **kwargs: Any) -> Any:
            self._streams.scheduler.remember()
            return run_shown(batch, *args, **kwargs)

        return run_batch

    def around_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps the model runner's `forward`."""

        def forward(batch: Any, *args: Any, **kwargs: Any) -> Any:
            mode, last = batch.forward_mode, self._kept[1]
            if mode.is_idle():
                return original(batch, *args, **kwargs)
            self._streams.forward.remember()
            few = mode.is_decode() or mode.is_target_verify()
            self._chosen.begin_step(few_tokens=few)
            run = partial(original, batch, *args, **kwargs)
            if last is not None and not self._chosen.in_line and self._may_be_early(batch, last):
                return self._early(batch, run)
            if self._chosen.join_due:
                self._chosen.join()
            late = not (few or self._chosen.in_line or self._observer.injects)
            view = self._view(batch, late=late)
            if view is None:
                return self._unseen(run)
            repeated, self._kept = view is last, (last, view)
            self._observer.before_write(view)
            if self._chosen.in_line:
                return self._in_line(view, run)
            return self._next_to(view, run, repeated=repeated, late=late)

        return forward

    def _view(self, batch: Any, *, late: bool = False) -> StepView | None:
        return built_view(partial(self._device_views.build, batch, self._requests, late=late), self._observer)

    def _may_be_early(self, batch: Any, last: StepView) -> bool:
        # The bytes are those of slots that neither the forward under way nor anything after it writes: it has
        # the same requests, so none of theirs came free since.
        return (
            self._next_to_in_a_row > 1
            and self._entries == self._streams.side.entries
            and self._device_views.repeats(batch, self._requests)
            and bool(guarded(self._observer, "step_view", self._observer.may_compare_early, last))
        )

    def _early(self, batch: Any, run: Callable[[], Any]) -> Any:
        views, observer, (_, side, _, early) = self._device_views, self._observer, self._streams
        view = self._view(batch, late=True)
        if view is None:
            self._chosen.join()
            return self._unseen(run)
        self._kept = self._kept[1], view
        with early:
            observer.before_write(view, views.late_slots)
        early.join()
        side.mark()
        try:
            result = run()
        except BaseException:
            self._chosen.join()
            self._next_to_in_a_row = 0
            guarded(observer, "step_view", views.keep_late)
            observer.forward_failed(view)
            raise
        side.launched()
        with side.after_mark:
            self._keep_late(view)
            self._check_after_mark(view)
        self._count_next_to()
        return result

    def _keep_late(self, view: StepView) -> None:
        started = time.perf_counter()
        try:
            self._device_views.keep_late()
        except Exception as error:  # noqa: BLE001 - a fault of the canary must not reach the engine
            self._observer.fault("step_view", error)
            self._observer.forward_failed(view)
        self._streams.early.kept()
        self._observer.overhead["adapter"] += time.perf_counter() - started

    def _in_line(self, view: StepView, run: Callable[[], Any]) -> Any:
        self._next_to_in_a_row = 0
        result = self._run(view, run)
        self._compare_read()
        self._observer.forward_launched(view)
        self._observer.after_forward(view)
        return result

    def _next_to(self, view: StepView, run: Callable[[], Any], *, repeated: bool, late: bool) -> Any:
        observer, side, early = self._observer, self._streams.side, self._streams.early
        if not repeated:
            side.mark()
        result = self._run(view, run)
        if repeated:  # soon launched as one (`Replays`): both checks wait for the forward
            with side.after_all:
                self._compare_read()
                observer.forward_launched(view)
                observer.after_forward(view)
                early.checked()
        else:
            side.launched()
            with side.after_mark:
                if late:
                    self._keep_late(view)
                self._check_after_mark(view)
        self._count_next_to()
        return result

    def _compare_read(self) -> None:
        """What the forward reads first: loads and prefix hits."""
        self.arrive()
        self.compare_hits()

    def _check_after_mark(self, view: StepView) -> None:
        self._compare_read()
        self._observer.forward_launched(view)
        self._streams.side.wait_launched()
        self._observer.after_forward(view)
        self._streams.early.checked()

    def _run(self, view: StepView, run: Callable[[], Any]) -> Any:
        try:
            return run()
        except BaseException:
            self._next_to_in_a_row = 0
            self._observer.forward_failed(view)
            raise

    def _unseen(self, run: Callable[[], Any]) -> Any:
        result, self._next_to_in_a_row = run(), 0
        self._chosen.join_due = True
        with self._streams.side.after_all:  # a baseline of any slot must not precede what it writes
            return result

    def _count_next_to(self) -> None:
        self._chosen.join_due = True
        self._next_to_in_a_row += 1
        self._entries = self._streams.side.entries


def _nothing() -> None:
    """Nothing is loaded."""
