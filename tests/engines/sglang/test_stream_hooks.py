"""The order of the observer's hooks and of the streams' joins where forwards run on a stream."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import pytest

from canary_obs.engines.sglang.stream_hooks import StreamHooks, Streams
from canary_obs.engines.toolkit.check_stream import STEPS_PER_QUERY
from tests.engines.sglang.test_step_hooks import Engine, Hits, Views, mode


class Recorded:
    """A stream that writes down what is done with it."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls, self.busy, self.entries = name, calls, True, 0
        self.on_stream = "in line"

    def __getattr__(self, name: str) -> Any:
        if name in ("join", "mark", "remember", "launched", "wait_launched", "checked", "kept"):
            return lambda: self.calls.append(f"{self.name} {name}")
        return self._entered(f"{self.name} {name}")

    @contextmanager
    def _entered(self, name: str) -> Any:
        self.entries += 1
        self.calls.append(name)
        yield
        self.calls.append(f"end {name}")

    def __enter__(self) -> None:
        self.calls.append(self.name)

    def __exit__(self, *raised: object) -> None:
        self.calls.append(f"end {self.name}")


class RepeatingViews(Views):
    """Of batches that are one word each."""

    def __init__(self, calls: list[str]) -> None:
        self.calls, self.late_slots = calls, "its slots"
        self.late_error: Exception | None = None

    def repeats(self, batch: Any, requests: Any) -> bool:
        return not batch.again.endswith("new")

    def build(self, batch: Any, requests: Any, *, late: bool = False) -> Any:
        self.calls.append("late view" if late else "view")
        super().build(batch, requests)
        return batch.again

    def keep_late(self) -> None:
        self.calls.append("keep")
        if self.late_error is not None:
            raise self.late_error


@pytest.fixture
def engine() -> Any:
    found = Engine()
    calls = found.observer.calls
    found.views, found.early = RepeatingViews(calls), True
    names = "forward", "side", "scheduler", "early"
    found.streams = streams = Streams(*[Recorded(name, calls) for name in names])  # type: ignore[arg-type]
    hooks = StreamHooks(found, found.views, found.observer, streams)  # type: ignore[arg-type]
    found.hooks, found.forward = hooks, hooks.around_forward(found._forward)
    found.run_batch = hooks.around_run_batch(lambda batch: found.forward(batch))
    found.on_idle = hooks.around_on_idle(lambda: None)
    # The stream of `after_step` is entered by the observer.
    found.after = []
    found.observer.after_step = found.after.append
    found.observer.may_compare_early = lambda view: found.early
    found.observer.injects = False
    return found


def run(engine: Any, view: str = "a", *, decodes: bool = True, verifies: bool = False) -> list[str]:
    """What one batch does, but for remembering its streams."""
    del engine.observer.calls[:]
    batch = mode(idle=False)
    batch.again, batch.forward_mode.is_decode = view, lambda: decodes
    batch.forward_mode.is_target_verify = lambda: verifies
    engine.run_batch(batch)
    return [call for call in engine.observer.calls if not call.endswith("remember")]


def aside(view: str) -> list[str]:
    """A batch that is not the last one again."""
    return [
        "view", f"before_write {view}", "side mark", "forward", "side launched", "side after_mark",
        f"forward_launched {view}", "side wait_launched", f"after_forward {view}", "early checked",
        "end side after_mark",
    ]  # fmt: skip


def prompt(view: str) -> list[str]:
    """One that computes prompts."""
    calls = aside(view)
    return ["late view", *calls[1:6], "keep", "early kept", *calls[6:]]


def again(view: str) -> list[str]:
    """One that is the last one again."""
    return [
        "side join", "view", f"before_write {view}", "forward", "side after_all", f"forward_launched {view}",
        f"after_forward {view}", "early checked", "end side after_all",
    ]  # fmt: skip


def early(view: str) -> list[str]:
    """The same, compared while the last one runs."""
    return [
        "late view", "early", f"before_write {view} its slots", "end early", "early join", "side mark",
        "forward", "side launched", "side after_mark", "keep", "early kept", f"forward_launched {view}",
        "side wait_launched", f"after_forward {view}", "early checked", "end side after_mark",
    ]  # fmt: skip


def test_checks_follow_the_launch_on_a_stream_of_their_own(engine: Any) -> None:
    assert run(engine, "a") == aside("a")
    assert engine.observer.calls[:2] == ["scheduler remember", "forward remember"]
    assert run(engine, "b new") == ["side join", *aside("b new")]


def test_prefix_hits_are_shown_after_loads_where_the_forward_is_checked(engine: Any) -> None:
    calls = engine.observer.calls
    engine.hooks._hits, engine.hooks.arrive = Hits(calls), lambda: calls.append("arrive")
    expected = prompt("a")
    place = expected.index("forward_launched a")
    expected[place:place] = ["arrive", "hits"]
    assert run(engine, "a", decodes=False) == ["admit", *expected]


def test_drafts_are_shown_before_their_launch(engine: Any) -> None:
    """What SGLang has of them is written anew by the next drafting."""
    assert run(engine, "a new", decodes=False, verifies=True) == aside("a new")
    assert run(engine, "b new", decodes=False)[:2] == ["side join", "late view"]


def test_a_batch_that_repeats_is_checked_after_its_forward(engine: Any) -> None:
    """With an event less. One that follows another is not."""
    engine.early = False
    assert run(engine, "b") == aside("b")
    assert [run(engine, "b") for _ in range(3)] == [again("b")] * 3
    assert run(engine, "a new") == ["side join", *aside("a new")]


def test_what_repeats_is_compared_while_the_last_forward_runs(engine: Any) -> None:
    """From the third on: the checks of the forward before the last one are waited for by their event."""
    assert run(engine) == aside("a")
    assert run(engine) == again("a")
    assert [run(engine) for _ in range(3)] == [early("a")] * 3
    assert run(engine, "b new") == ["side join", *aside("b new")]


@pytest.mark.parametrize("what", ["observer", "entered", "fault"])
def test_not_where_records_may_still_change(engine: Any, what: str) -> None:
    run(engine)
    run(engine)
    if what == "observer":
        engine.early = False
    elif what == "entered":  # by a task between the steps
        with engine.streams.side.unordered:
            pass
    else:
        engine.observer.may_compare_early = None  # cannot be called
    found = [call for call in run(engine) if not call.startswith("fault")]
    assert found == again("a")
    assert any(call.startswith("fault step_view") for call in engine.observer.calls) == (what == "fault")


def test_what_a_prompt_shows_is_put_together_after_its_launch(engine: Any) -> None:
    run(engine)
    assert run(engine, "a new", decodes=False) == ["side join", *prompt("a new")]
    assert run(engine, "b new", decodes=False) == ["side join", *prompt("b new")]


def test_faults_are_injected_into_values_that_are_there(engine: Any) -> None:
    engine.observer.injects = True
    assert run(engine, "a new", decodes=False) == aside("a new")


def test_values_of_a_prompt_that_could_not_be_kept_are_a_fault(engine: Any) -> None:
    engine.views.late_error = LookupError("made up")
    calls = run(engine, "a new", decodes=False)
    assert calls[6:10] == ["keep", "fault step_view made up", "forward_failed a new", "early kept"]


def test_a_prompt_that_raises_is_a_forward_that_failed(engine: Any) -> None:
    engine.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        run(engine, "a new", decodes=False)
    assert engine.observer.calls[-2:] == ["forward", "forward_failed a new"]


def test_not_after_a_forward_that_nobody_saw(engine: Any) -> None:
    for _ in range(3):
        run(engine)
    engine.views.error = LookupError("made up")
    assert run(engine) == [
        "late view", "fault step_view made up", "side join", "forward", "side after_all",
        "end side after_all",
    ]  # fmt: skip
    engine.views.error = None
    assert [run(engine) for _ in range(3)] == [again("a"), again("a"), early("a")]


def test_values_that_could_not_be_kept_are_a_fault(engine: Any) -> None:
    for _ in range(3):
        run(engine)
    engine.views.late_error = MemoryError("made up")
    calls = run(engine)
    assert calls[10:13] == ["fault step_view made up", "forward_failed a", "early kept"]


def test_an_early_forward_that_raises_keeps_its_values_first(engine: Any) -> None:
    for _ in range(3):
        run(engine)
    engine.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        run(engine)
    assert engine.observer.calls[-4:] == ["forward", "side join", "keep", "forward_failed a"]
    engine.error = None
    assert run(engine) == again("a")[1:]  # the side stream was waited for


def test_a_device_that_waits_has_its_decodes_checked_in_line(engine: Any) -> None:
    engine.streams.forward.busy = False
    for _ in range(STEPS_PER_QUERY):
        run(engine, "a new")
    assert engine.after[-1] == "in line"
    checks = ["forward_launched a", "after_forward a"]
    assert run(engine) == ["view", "before_write a", "forward", *checks]
    # Prompts take long.
    assert run(engine, "a new", decodes=False) == prompt("a new")
    assert engine.after[-1] != "in line"
    assert [run(engine)[0] for _ in range(3)] == ["side join", "side join", "view"]
    engine.streams.forward.busy = True
    for _ in range(STEPS_PER_QUERY):
        run(engine)
    assert run(engine)[0] in ("late view", "side join")


def test_a_forward_that_raises_is_not_followed_by_checks(engine: Any) -> None:
    engine.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        run(engine, "a")
    assert engine.observer.calls[-3:] == ["side mark", "forward", "forward_failed a"]


def test_a_view_that_cannot_be_built_stays_the_canarys_affair(engine: Any) -> None:
    engine.views.error = LookupError("made up")
    assert run(engine) == [
        "view",
        "fault step_view made up",
        "forward",
        "side after_all",  # what is launched next to a step follows this forward, too
        "end side after_all",
    ]


def test_a_batch_without_tokens_is_not_shown(engine: Any) -> None:
    engine.run_batch(mode(idle=True))
    assert engine.observer.calls == ["scheduler remember", "forward"]


def test_idle_work_follows_the_checks(engine: Any) -> None:
    engine.on_idle()
    assert engine.observer.calls == ["side join", "forward join", "idle"]


def test_a_device_that_works_is_in_a_step(engine: Any) -> None:
    assert engine.hooks.under_way
    engine.streams.forward.busy = False
    assert not engine.hooks.under_way


@pytest.mark.parametrize("early", [False, True], ids=["apart", "early"])
def test_the_tensors_of_a_view_outlive_the_next_one(engine: Any, early: bool) -> None:
    engine.early = early
    for _ in range(5):
        run(engine, "a+b")
    assert engine.hooks._kept == ("a+b", "a+b")


def test_work_in_order_follows_the_forwards_and_their_checks(engine: Any) -> None:
    engine.streams.forward.busy = False
    for _ in range(2 * STEPS_PER_QUERY):
        in_line = run(engine, "a new")
    assert in_line == run(engine, "a new") == ["view", "before_write a new", "forward", *in_line[3:]]
    del engine.observer.calls[:]
    with engine.hooks.in_order():
        engine.observer.calls.append("work")
    engine.hooks.precede()
    assert engine.observer.calls == [
        "side after_all", "forward join", "work", "end side after_all", "side join",
    ]  # fmt: skip
    assert run(engine, "a")[0] == "side join"  # and is not compared early


def test_what_was_loaded_is_compared_before_the_checks_of_the_forward_that_reads_it(engine: Any) -> None:
    calls = engine.observer.calls
    engine.hooks.arrive = lambda: calls.append("arrive")
    found = run(engine, "a new", decodes=False)
    assert found[found.index("arrive") + 1] == "forward_launched a new"
    assert found.index("side after_mark") < found.index("arrive") < found.index("end side after_mark")
    again_after = run(engine, "a new")
    assert again_after.count("arrive") == 1
    engine.streams.forward.busy = False
    for _ in range(2 * STEPS_PER_QUERY):
        in_line = run(engine, "a new")
    assert in_line[-3:] == ["arrive", "forward_launched a new", "after_forward a new"]
    del calls[:]
    engine.hooks.idle()
    assert calls.index("arrive") == calls.index("idle") - 1
