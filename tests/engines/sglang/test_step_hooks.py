"""The order of the observer's hooks around SGLang's methods, and what a failure leaves of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from canary_obs.engines.sglang.step_hooks import StepHooks


class Observer:
    """Writes down what is called."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.overhead = {"adapter": 0.0}
        self.more = False

    def idle(self) -> bool:
        self.calls.append("idle")
        return self.more

    def fault(self, part: str, error: Exception) -> None:
        self.calls.append(f"fault {part} {error}")

    def __getattr__(self, name: str) -> Any:
        return lambda *view: self.calls.append(" ".join([name, *map(str, view)]))


class Views:
    """A view is a word here."""

    error: Exception | None = None

    def build(self, batch: Any, requests: Any) -> Any:
        if self.error is not None:
            raise self.error
        return "+".join(requests)


def mode(*, idle: bool) -> Any:
    return SimpleNamespace(
        forward_mode=SimpleNamespace(name="IDLE" if idle else "DECODE", is_idle=lambda: idle), reqs=["a", "b"]
    )


class Engine:
    """A scheduler whose worker calls the model runner's forward."""

    def __init__(self) -> None:
        self.observer, self.views, self.now, self.idle = Observer(), Views(), 0.0, True
        self.hooks = StepHooks(self, self.views, self.observer, lambda: self.now)  # type: ignore[arg-type]
        self.forward = self.hooks.around_forward(self._forward)
        self.run_batch = self.hooks.around_run_batch(lambda batch: self.forward(batch))
        self.on_idle = self.hooks.around_on_idle(lambda: self.observer.calls.append("engine's own"))
        self.error: BaseException | None = None

    def is_fully_idle(self) -> bool:
        return self.idle

    def _forward(self, batch: Any) -> str:
        self.observer.calls.append("forward")
        if self.error is not None:
            raise self.error
        return "logits"


def test_a_batch() -> None:
    engine = Engine()
    assert engine.run_batch(mode(idle=False)) == "logits"
    assert engine.observer.calls == ["before_forward a+b", "forward", "after_forward a+b", "after_step"]
    assert (engine.hooks.requests, engine.hooks.empty_batches, engine.hooks.under_way) == (2, 0, False)
    assert engine.observer.overhead["adapter"] > 0.0


class Hits:
    """Prefix hits of the next batch."""

    def __init__(self, calls: list[str]) -> None:
        self.calls, self.waiting = calls, False

    def admit(self, batch: Any) -> None:
        self.calls.append("admit")
        self.waiting = True

    def show(self, observer: Observer) -> None:
        self.calls.append("hits")
        self.waiting = False


def test_prefix_hits_are_shown_once_before_the_forward() -> None:
    engine = Engine()
    calls = engine.observer.calls
    engine.hooks._hits = Hits(calls)  # type: ignore[assignment]
    engine.run_batch(mode(idle=True))
    assert calls == ["forward"]
    calls.clear()
    engine.run_batch(mode(idle=False))
    assert calls[:4] == ["admit", "hits", "before_forward a+b", "forward"]
    calls.clear()
    engine.forward(mode(idle=False))
    assert calls[:2] == ["before_forward ", "forward"]


def test_a_batch_without_tokens_is_counted_and_not_shown() -> None:
    engine = Engine()
    assert engine.run_batch(mode(idle=True)) == "logits"
    assert engine.observer.calls == ["forward"]
    assert (engine.hooks.requests, engine.hooks.empty_batches) == (0, 1)


def test_a_forward_that_raises() -> None:
    engine = Engine()
    engine.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        engine.run_batch(mode(idle=False))
    assert engine.observer.calls == ["before_forward a+b", "forward", "forward_failed a+b"]
    assert not engine.hooks.under_way


def test_a_view_that_cannot_be_built_stays_the_canarys_affair() -> None:
    engine = Engine()
    engine.views.error = LookupError("made up")
    assert engine.run_batch(mode(idle=False)) == "logits"
    assert engine.observer.calls == ["fault step_view made up", "forward", "after_step"]


def test_the_requests_of_a_batch_are_not_those_of_a_forward_outside_of_it() -> None:
    engine = Engine()
    engine.run_batch(mode(idle=False))
    engine.observer.calls.clear()
    engine.forward(mode(idle=False))
    assert engine.observer.calls[0] == "before_forward "


def test_idle_work_waits_for_its_turn() -> None:
    """SGLang turns thousands of times a second."""
    engine = Engine()
    for now in (0.0, 0.0001, 0.0199, 0.0201, 0.03):
        engine.now = now
        engine.on_idle()
    assert engine.observer.calls == ["idle", *["engine's own"] * 3, "idle", *["engine's own"] * 2]


def test_idle_work_waits_until_requests_have_stopped_coming() -> None:
    """A client may ask one after the other: the next request would wait for it."""
    engine, done = Engine(), list[float]()
    engine.hooks.idle = lambda: bool(done.append(engine.now))  # type: ignore[method-assign]
    for now, request in ((1.0, True), (1.01, False), (1.04, False), (1.051, True), (1.06, False)):
        engine.now = now
        if request:
            engine.run_batch(mode(idle=False))
        engine.on_idle()
    assert done == []
    for engine.now in (1.1, 1.102, 1.11, 1.123):
        engine.on_idle()
    assert done == [1.102, 1.123]


def test_idle_work_that_is_not_done_goes_on_sooner() -> None:
    engine = Engine()
    engine.observer.more = True
    for now in (0.0, 0.0005, 0.0011):
        engine.now = now
        engine.on_idle()
    assert engine.observer.calls.count("idle") == 2


def test_a_scheduler_with_parked_work_is_not_idle() -> None:
    engine = Engine()
    engine.idle = False
    engine.on_idle()
    assert engine.observer.calls == ["engine's own"]
