"""When the canary's hooks run in SGLang's scheduler: around batches, forwards, and while it is idle."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

from canary_obs.engine_api.observer import Observer
from canary_obs.engine_api.views import StepView
from canary_obs.engines.sglang.built_view import built_view
from canary_obs.engines.sglang.prefix_hits import PrefixHits
from canary_obs.engines.sglang.speculation import Speculation
from canary_obs.engines.toolkit.guarded import guarded
from canary_obs.engines.toolkit.idle_thread import QUIET_SECONDS
from canary_obs.engines.toolkit.shown_forward import shown_forward

# Of a batch whose KV came from another server only its first token is processed.
_WITHOUT_FORWARD = frozenset({"IDLE", "PREBUILT"})
# An idle scheduler turns some 3000 times a second, and new requests wait for each turn to end.
_IDLE_SECONDS, _MORE_WORK_SECONDS = 0.02, 0.001


class ViewSource(Protocol):
    """Builds the view of a forward."""

    def build(self, batch: Any, requests: Sequence[Any]) -> StepView:
        """Of a forward batch and the scheduler's requests in it."""


class StepHooks:
    """Calls the observer around each batch of one scheduler, in this order:

        run_batch is called         the batch and its requests are counted
            forward is called       hit, then before_forward, with all checks that precede the forward
            forward returns         after_forward
        run_batch returns           after_step

    All of it is on the scheduler's thread, with both of SGLang's loops.
    """

    def __init__(
        self,
        scheduler: Any,
        views: ViewSource,
        observer: Observer,
        clock: Callable[[], float] = time.monotonic,
        speculation: Speculation | None = None,
        hits: PrefixHits | None = None,
    ) -> None:
        """`hits`: None = prefix hits are not compared."""
        self.speculation, self._hits = speculation, hits
        self._scheduler, self._views, self._observer, self._clock = scheduler, views, observer, clock
        self._requests: Sequence[Any] = ()  # of the batch under way
        self.ran: Callable[[Any], None] | None = None  # is given each batch, after its checks
        self.launching = False  # a batch
        self.empty_batches = 0  # that the scheduler counts, and that have no tokens
        self.requests = 0  # with tokens in batches, one by one
        self._idle_due = 0.0
        self._rests = True  # whether it has turned without a batch since the last one

    @property
    def under_way(self) -> bool:
        """Whether a batch is under way."""
        return self.launching

    def stop(self) -> None:
        """The hooks are not called any more."""

    def in_order(self) -> AbstractContextManager[None]:
        """As all checks are."""
        return nullcontext()

    def precede(self) -> None:
        """They are over."""

    def end_step(self) -> None:
        """The batch was launched; on the scheduler's stream."""
        self._observer.after_step()

    def idle(self) -> bool:
        """Work while the scheduler is idle, on its stream. True = more is left."""
        return self._observer.idle()

    def around_run_batch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps the scheduler's `run_batch`."""

        def run_batch(batch: Any, *args: Any, **kwargs: Any) -> Any:
            empty = batch.forward_mode.name in _WITHOUT_FORWARD
            if empty:
                self.empty_batches += 1
            else:
                self._requests = batch.reqs
                self.requests += len(batch.reqs)
                if self._hits is not None:
                    guarded(self._observer, "step_view", self._hits.admit, batch)
            self.launching, self._rests = True, False
            try:
                if not empty and self.speculation is not None:
                    guarded(self._observer, "step_view", self.speculation.begin, batch)
                result = original(batch, *args, **kwargs)
                if not empty and self.speculation is not None:
                    guarded(self._observer, "step_view", self.speculation.end, result)
            finally:
                self.launching = False
                self._requests = ()
            if not empty:
                self.end_step()
                if self.ran is not None:
                    guarded(self._observer, "transfer", self.ran, batch)
            return result

        return run_batch

    def around_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps the model runner's `forward`."""

        def view_of(batch: Any) -> StepView | None:
            if batch.forward_mode.is_idle():
                return None
            self.compare_hits()
            return self._view(batch)

        return shown_forward(original, view_of, self._observer)

    def compare_hits(self) -> None:
        """Have the bytes compared that requests of the batch under way found in the prefix cache."""
        if self._hits is not None and self._hits.waiting:
            guarded(self._observer, "step_view", self._hits.show, self._observer)

    def around_on_idle(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps the scheduler's `on_idle`, which may sleep."""

        def on_idle() -> Any:
            now = self._clock()
            if not self._rests:
                # A client that asks one request after the other has its next one here soon.
                self._rests, self._idle_due = True, max(self._idle_due, now + QUIET_SECONDS)
            # Also called with requests that wait for memory or for another rank.
            if now >= self._idle_due and self._scheduler.is_fully_idle():
                more = self.idle()
                self._idle_due = self._clock() + (_MORE_WORK_SECONDS if more else _IDLE_SECONDS)
            return original()

        return on_idle

    def _view(self, batch: Any) -> StepView | None:
        return built_view(partial(self._views.build, batch, self._requests), self._observer)
