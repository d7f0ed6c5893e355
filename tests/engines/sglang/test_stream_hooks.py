"""The order of the observer's hooks and of the streams' joins where forwards run on a stream."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import pytest

from canary_obs.engines.sglang.stream_hooks import StreamHooks
from tests.engines.sglang.test_step_hooks import Engine, mode


class Streams:
    """Both streams, which write down what is done with them."""

    def __init__(self, calls: list[str]) -> None:
        self.calls, self.busy = calls, False

    def __getattr__(self, name: str) -> Any:
        if name in ("join", "mark", "remember", "launched", "wait_launched"):
            return lambda: self.calls.append(name)
        return self._entered(name)

    @contextmanager
    def _entered(self, name: str) -> Any:
        self.calls.append(name)
        yield
        self.calls.append(f"end {name}")


@pytest.fixture
def engine() -> Any:
    found = Engine()
    found.streams = streams = Streams(found.observer.calls)
    hooks = StreamHooks(found, found.views, found.observer, (streams,) * 3)  # type: ignore[arg-type]
    found.hooks, found.forward = hooks, hooks.around_forward(found._forward)
    found.run_batch = hooks.around_run_batch(lambda batch: found.forward(batch))
    found.on_idle = hooks.around_on_idle(lambda: None)
    # The stream of `after_step` is entered by the observer.
    found.observer.after_step = lambda stream: found.observer.calls.append("after_step")
    return found


def test_checks_follow_the_launch_on_a_stream_of_their_own(engine: Any) -> None:
    assert engine.run_batch(mode(idle=False)) == "logits"
    assert engine.observer.calls == [
        "remember", "remember", "join", "before_write a+b", "mark", "forward", "launched",
        "after_mark", "forward_launched a+b", "wait_launched", "after_forward a+b", "end after_mark",
        "after_step",
    ]  # fmt: skip


def test_a_batch_that_repeats_is_checked_after_its_forward(engine: Any) -> None:
    """With an event less. One that follows another is not."""
    engine.views.build = lambda batch, requests: engine.shown
    for shown, repeats in (("a", False), ("b", False), ("b", True), ("b", True), ("a", False)):
        engine.shown = shown
        del engine.observer.calls[:]
        engine.run_batch(mode(idle=False))
        after = [f"forward_launched {shown}", f"after_forward {shown}"]
        if repeats:
            checks = ["forward", "after_all", *after, "end after_all"]
        else:
            checks = [
                "mark",
                "forward",
                "launched",
                "after_mark",
                after[0],
                "wait_launched",
                after[1],
                "end after_mark",
            ]
        assert engine.observer.calls[3:-1] == [f"before_write {shown}", *checks]


def test_a_forward_that_raises_is_not_followed_by_checks(engine: Any) -> None:
    engine.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        engine.run_batch(mode(idle=False))
    assert engine.observer.calls[-2:] == ["forward", "forward_failed a+b"]


def test_a_view_that_cannot_be_built_stays_the_canarys_affair(engine: Any) -> None:
    engine.views.error = LookupError("made up")
    assert engine.run_batch(mode(idle=False)) == "logits"
    assert engine.observer.calls == ["remember"] * 2 + [
        "join",
        "fault step_view made up",
        "forward",
        "after_all",  # what is launched next to a step follows this forward, too
        "end after_all",
        "after_step",
    ]


def test_a_batch_without_tokens_is_not_shown(engine: Any) -> None:
    engine.run_batch(mode(idle=True))
    assert engine.observer.calls == ["remember", "forward"]


def test_idle_work_follows_the_checks(engine: Any) -> None:
    engine.on_idle()
    assert engine.observer.calls == ["join", "idle"]


def test_a_device_that_works_is_in_a_step(engine: Any) -> None:
    assert not engine.hooks.under_way
    engine.streams.busy = True
    assert engine.hooks.under_way


def test_the_tensors_of_a_view_outlive_the_next_one(engine: Any) -> None:
    for _ in range(3):
        engine.run_batch(mode(idle=False))
    assert engine.hooks._kept == ("a+b", "a+b")
