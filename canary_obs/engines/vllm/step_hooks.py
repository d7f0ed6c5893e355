"""When the canary's hooks run in a step of a vLLM model runner."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import Lock
from typing import Any, Protocol

from canary_obs.engine_api.launches import FEW_TOKENS
from canary_obs.engine_api.observer import Observer
from canary_obs.engine_api.views import StepView
from canary_obs.engines.toolkit.check_stream import CheckStream
from canary_obs.engines.toolkit.forward_stream import ForwardStream
from canary_obs.engines.toolkit.guarded import guarded
from canary_obs.engines.toolkit.idle_thread import IdleThread
from canary_obs.engines.toolkit.side_stream import SideStream
from canary_obs.engines.vllm.draft_groups import DraftGroups
from canary_obs.errors import KVCacheViolation


class StepSource(Protocol):
    """What the hooks need from the adapter of a model runner."""

    completes_views: bool  # else a view is complete when it is built

    @property
    def forward_counted(self) -> bool:
        """Whether a forward was counted that the runner may not have begun."""

    def follow_output(self, output: Any, observer: Observer) -> None:
        """Follow the requests and blocks of a scheduler output; failures are reported as faults."""

    def end_step(self, observer: Observer) -> None:
        """Report what arrived during the step under way; after its forward, on a stream that waits for it."""

    def complete_view(self, view: StepView) -> StepView:
        """The view with what may be added after the forward's launch: ids, digests and expected ids."""


class StepHooks:
    """Calls the observer around each step of one model runner, in this order:

        execute_model is called   end the step before, join the side stream, follow the scheduler's output
            forward begins        `begin_forward`: before_write
        the step ends             `end_step`: forward_launched, after_forward, after_step, on a CheckStream

    The step ends when execute_model returns (V1), in sample_tokens after the logits (V2), or, where a draft
    model runs or this forward has loaded KV, after sample_tokens. Where a forward's inputs change before the
    next step, which is what `inputs_persist=False` says, all of its checks precede it: before_forward
    replaces the first two. What has arrived is then judged after sample_tokens, if it is reported there.
    """

    def __init__(
        self,
        source: StepSource,
        observer: Observer,
        streams: tuple[ForwardStream, SideStream],
        drafts: DraftGroups | None,
        *,
        inputs_persist: bool,
    ) -> None:
        self.observer = observer
        self.lock = Lock()  # held during a step and by idle work
        self.output: Any = None  # scheduler output of the step under way; None = warm-up or no step
        self.last_output: Any = None  # the last one that had tokens to compute
        self.forward_stream, self.side_stream = streams
        self._check_stream = CheckStream(*streams)
        context = partial(self.forward_stream.context, self.side_stream)
        self.idle_thread = IdleThread(self.lock, observer.idle, context, self._busy)
        self._source, self._drafts, self._inputs_persist = source, drafts, inputs_persist
        self._ends_at_sampling = False  # not when execute_model returns
        self._view: StepView | None = None  # of the forward under way
        self._launched_due = False  # forward_launched is still to be called for it
        self._end_due = False  # `end_step` is still to be called
        self._host_seconds = 0.0  # spent in the adapter since the last report
        # Whether the step must end after sampling, when the runner has asked its connector what was loaded.
        self.late_reports: Callable[[], bool] = bool  # no, by a call that runs no Python
        self.reported_at_sampling = False  # V2: not when execute_model returns
        self._arrivals_due = False  # what the step has loaded is still to be judged
        self.after_launch: list[Callable[[], None]] = []  # called when execute_model returns, before checks
        self.after_checks: list[Callable[[], None]] = []  # called when a step's records are complete

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While entered, no step runs and the idle thread makes no calls."""
        with self.lock, self.forward_stream.context(self.side_stream):
            yield

    @property
    def under_way(self) -> bool:
        """Whether a step is under way, on the host or, as the idle thread saw it last, on the device."""
        idle_thread = getattr(self, "idle_thread", None)  # gone after `stop`
        return self.lock.locked() or (idle_thread is not None and idle_thread.device_busy)

    def stop(self) -> None:
        """Stop the idle thread. The hooks must not be called any more."""
        self.idle_thread.stop()
        del self.idle_thread  # the reference cycle would keep the canary's device memory until the next gc

    # The forward -----------------------------------------------------------------------------------

    def begin_forward(self, build: Callable[[], StepView]) -> None:
        """The target's forward is next; `build` makes its view, which the source completes later.

        The view names the draft groups like the others; they are checked after drafting.
        """
        if self._view is not None:  # a second forward in one step: the first is unknown
            self._end_forward(self.observer.forward_failed)
        if self.forward_stream.unknown:
            self.forward_stream.remember()
        self._view = self._built(build)
        if self._view is None:
            return
        if self._inputs_persist:
            self._launched_due = True
            self.observer.before_write(self._view)
            return
        self._view = self._built(partial(self._complete_with_drafts, self._view))
        if self._view is not None:
            self.observer.before_forward(self._view)

    def _check_forward(self) -> None:
        """The forward was launched, and its inputs are still there: run the checks that read them."""
        incomplete, self._launched_due = self._view, False
        if incomplete is None:
            return
        if self._source.completes_views:
            self._view = self._built(partial(self._source.complete_view, incomplete))
        if self._view is not None:
            self.observer.forward_launched(self._view)
        else:
            self.observer.forward_failed(incomplete)

    def _complete_with_drafts(self, view: StepView) -> StepView:
        complete = self._source.complete_view(view)
        return complete if self._drafts is None else self._drafts.begin(complete, self.observer)

    def _end_forward(self, hook: Callable[[StepView], None]) -> None:
        """Call the hook for the forward under way, if there is one."""
        view, self._view, self._launched_due = self._view, None, False
        if view is not None:
            hook(view)
            if view.launches is not None and view.launches.due:  # by nobody: the next step's follow it
                guarded(self.observer, "step_view", view.launches.launch_head)

    def _built(self, build: Callable[[], StepView]) -> StepView | None:
        """A view, or None when building it failed, which is reported."""
        started = time.perf_counter()
        try:  # not by `guarded`: every step pays for each call
            return build()
        except KVCacheViolation:
            raise
        except Exception as error:  # noqa: BLE001 - a fault of the canary must not reach the engine
            self.observer.fault("step_view", error)
            return None
        finally:
            self._host_seconds += time.perf_counter() - started

    # The step --------------------------------------------------------------------------------------

    def around_execute_model(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps the runner's `execute_model`."""

        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            if self.idle_thread.raised is not None:
                raise self.idle_thread.raised
            with self.lock:
                # A step that was not sampled has not ended, and what was drafted in it is unknown.
                if self._end_due:
                    self.end_step()
                self._arrivals_due = False
                self.output = scheduler_output
                most = FEW_TOKENS * len(scheduler_output.num_scheduled_tokens)
                chosen = self._check_stream
                chosen.begin_step(few_tokens=scheduler_output.total_num_scheduled_tokens <= most)
                if chosen.join_due:
                    chosen.join()
                if self._drafts is not None:
                    self._drafts.fail(self.observer)
                try:
                    started = time.perf_counter()
                    self._source.follow_output(scheduler_output, self.observer)
                    self._host_seconds += time.perf_counter() - started
                    result = original(scheduler_output, *args, **kwargs)
                    for act in self.after_launch:
                        act()
                except BaseException:
                    self._end_forward(self.observer.forward_failed)
                    if self._drafts is not None:
                        self._drafts.fail(self.observer)
                    raise
                finally:
                    self.output = None
                    self.idle_thread.last_step = time.monotonic()
                if scheduler_output.total_num_scheduled_tokens:
                    self.last_output = scheduler_output
                    self._end_due = True
                    if not self._ends_at_sampling:
                        self.end_step()
                return result

        return execute_model

    def end_step(self) -> None:
        """Run what follows the step's forwards, after all launches so far; idempotent."""
        if not self._end_due:
            return
        self._end_due = False
        with self._check_stream.entered():
            if self._launched_due:
                self._check_forward()
            self.observer.overhead["adapter"] += self._host_seconds
            self._host_seconds = 0.0
            # With changing inputs the checks cannot wait for the report, but the judgement can.
            late = not self._inputs_persist and self.reported_at_sampling
            self._arrivals_due = late and self.late_reports()
            if not self._arrivals_due:
                try:  # not by `guarded`: every step pays for each call
                    self._source.end_step(self.observer)
                except KVCacheViolation:
                    raise
                except Exception as error:  # noqa: BLE001 - a fault of the canary must not reach the engine
                    self.observer.fault("announce", error)
            self._end_forward(self.observer.after_forward)
            for act in self.after_checks:
                act()
            if self._drafts is None or not self._drafts.pending:
                self.observer.after_step()

    def _end_arrivals(self) -> None:
        """The connector has reported what the step could not load."""
        if self._arrivals_due:
            self._arrivals_due = False
            with self._check_stream.entered():
                guarded(self.observer, "announce", self._source.end_step, self.observer)

    def _busy(self) -> bool:
        if self._end_due or (self._drafts is not None and self._drafts.pending):
            return True
        if self._source.forward_counted:  # as an idle moment, this would be a forward that was not shown
            return True
        return self.forward_stream.busy

    # Sampling --------------------------------------------------------------------------------------

    def around_compute_logits(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps the model's `compute_logits`, after which the step ends; needs `around_sample_tokens` too."""
        self._ends_at_sampling = True

        def compute_logits(*args: Any, **kwargs: Any) -> Any:
            logits = original(*args, **kwargs)
            if not self.late_reports():
                self.end_step()
            return logits

        return compute_logits

    def around_sample_tokens(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps the runner's `sample_tokens`; ends the step if that was not done before."""

        def sample_tokens(*args: Any, **kwargs: Any) -> Any:
            with self.lock:
                result = original(*args, **kwargs)
                if self._end_due:
                    self.end_step()
                if self._arrivals_due:
                    self._end_arrivals()
                return result

        return sample_tokens

    def around_drafting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps the runner's `sample_tokens` where a draft model runs in it."""
        drafts = self._drafts
        assert drafts is not None

        def sample_tokens(*args: Any, **kwargs: Any) -> Any:
            with self.lock:
                try:
                    result = original(*args, **kwargs)
                except BaseException:
                    drafts.fail(self.observer)
                    raise
                finally:
                    self.idle_thread.last_step = time.monotonic()
                self._end_arrivals()
                if drafts.pending:
                    drafts.end(self.observer)
                    self.observer.after_step()
            return result

        return sample_tokens
