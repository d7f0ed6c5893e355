"""The checks of a batch that repeats, launched as one, do what they do one by one."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from canary_kernels import layout
from canary_obs.engines.toolkit.known_tokens import KnownTokens
from canary_obs.engines.toolkit.later import Later
from canary_obs.runtime.device import replays
from canary_obs.runtime.forward import may_repeat
from canary_obs.vocabulary import State
from tests.runtime.steady import Steady

EVENTS = ("nothing", "nothing", "flip", "chain", "fed", "lost", "invalidated", "again")


def repeat(engine: Steady, more: int) -> replays.Replays:
    """Until head and tail are captured, and so many steps more."""
    for _ in range(replays.REPEATS):
        engine.step()
    kept = engine.canary.checks.replays
    assert kept is not None
    kept.end_forward(long=True)
    for _ in range(more):
        engine.step()
    return kept


def run(
    events: list[str],
    *,
    replaying: bool,
    backend: str,
    device: str = "cpu",
    early: bool = False,
    **shown: Any,
) -> tuple[Any, int]:
    """What is found, and how many forwards were replayed."""
    engine = Steady(3, device, backend=backend, **shown)
    # No pass over all records, which counts: when one begins on a GPU is a matter of time.
    engine.canary.baselines._settles_at = 1 << 62
    if not replaying:
        engine.canary.checks.replays = None
    for number, event in enumerate(events):
        before = int(engine.slots[0])
        if event == "flip":
            engine.memory[1, 0, before, 0, number % 8] ^= 1 << number
        elif event == "chain":
            engine.canary.state.groups[0].buffers.records[before, 1] ^= 1 << number
        elif event == "again" and engine.length:
            engine.length -= 1  # the same slots are written over

        def forget(slots: Any) -> None:
            engine.canary.invalidated("full", slots[:1])

        engine.step(
            between=forget if event == "invalidated" else None,
            fed=int(event == "fed"),
            lost=event == "lost",
            early=early,
        )
    found, kept = engine.found(), engine.canary.checks.replays
    engine.close()
    return found, 0 if kept is None else kept.replayed


@settings(max_examples=25)
@given(
    st.lists(st.sampled_from(EVENTS), min_size=4, max_size=20),
    st.sampled_from(["torch", "numba"]),
    st.fixed_dictionaries({"window": st.sampled_from([None, 3]), "launches": st.booleans()}),
)
def test_records_and_findings_are_those_of_launches_one_by_one(
    events: list[str], backend: str, shown: dict[str, Any]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replays, "REPEATS", 2)
        patch.setattr(replays, "FORWARDS_WAITED", 0)
        replayed = run(events, replaying=True, backend=backend, **shown)
    assert replayed[0] == run(events, replaying=False, backend=backend, **shown)[0]
    # Heads are captured as the second forward ends, tails as the third does.
    assert replayed[1] == len(events[2:]) + sum(event != "invalidated" for event in events[3:])


def test_a_forward_that_fails_leaves_no_launch_behind() -> None:
    engine = Steady(2)
    repeat(engine, 2)
    engine.adapter.counted["full"] += 1
    engine.canary.before_write(engine.view)
    engine.canary.forward_launched(engine.view)
    engine.canary.forward_failed(engine.view)
    engine.canary.after_step()
    engine.step()
    engine.canary.check_everything()
    assert engine.canary.state.counters[0] >= 0
    assert not any("kernel" in reason for reason in engine.canary.verdict()[1])
    engine.close()


def test_where_the_head_precedes_the_forward_nothing_waits_for_the_tail() -> None:
    engine = Steady(2)
    repeat(engine, 2)
    written = engine.canary.state.groups[0].buffers.records
    engine.lens.fill_(engine.length)
    engine.positions.fill_(engine.length)
    engine.slots.add_(1)
    engine.adapter.counted["full"] += 1
    before = written[engine.slots].clone()
    engine.canary.before_forward(engine.view)
    assert not torch.equal(written[engine.slots], before)
    engine.canary.after_forward(engine.view)
    assert engine.canary.checks.replays is None
    engine.close()


def test_as_many_batches_are_kept_as_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """By last use: one that is shown again in between stays."""
    monkeypatch.setattr(replays, "KEPT", 3)
    monkeypatch.setattr(replays, "REPEATS", 1)
    kept, made = replays.Replays(torch.device("cpu")), [object() for _ in range(5)]
    batches: list[Any] = [[one] for one in made]
    for one in (*batches[:3], batches[0], *batches[3:]):
        kept.use(one, lambda: None)
        kept.capture()
    assert kept.captured == 5
    assert [kept.use(one, lambda: None) is not None for one in (batches[0], *batches[3:])] == [True] * 3
    assert [kept.use(one, lambda: None) for one in batches[1:3]] == [None] * 2


def test_a_capture_waits_for_a_long_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not for ever; one that was forgotten meanwhile is not made."""
    monkeypatch.setattr(replays, "REPEATS", 1)
    monkeypatch.setattr(replays, "FORWARDS_WAITED", 5)
    monkeypatch.setattr(replays, "KEPT", 4)
    kept, made = replays.Replays(torch.device("cpu")), [[object()] for _ in range(5)]
    for one in made:  # the first is forgotten
        kept.use(one, lambda: None)
        kept.end_forward(long=False)
    assert kept.captured == 0
    kept.end_forward(long=True)  # the first and the second
    assert kept.captured == 1
    kept.capture()
    for _ in range(5):
        kept.end_forward(long=False)
        assert kept.captured == 2
    kept.end_forward(long=False)
    assert kept.captured == 3
    assert [kept.use(one, lambda: None) is not None for one in made[1:]] == [True, True, True, False]


@pytest.mark.parametrize(("tokens", "may"), [(2, True), (4, True), (32, True), (3, False), (34, False)])
def test_what_computes_as_many_and_few_tokens_of_each_request_may_repeat(tokens: int, may: bool) -> None:
    """Of a forward of prompts nothing is kept: it would take the place of one that comes again."""
    engine = Steady(2)
    engine.view = replace(engine.view, input_ids=torch.zeros(tokens, dtype=torch.int64))
    assert may_repeat(engine.view) is may
    kept = engine.canary.checks.replays
    assert kept is not None
    engine.step()
    assert bool(kept._kept) is may
    engine.close()


def test_a_forward_that_computes_a_prompt_is_a_long_one() -> None:
    engine = Steady(2)
    kept = repeat(engine, 0)
    assert kept.captured == 2
    long = replace(engine.view, input_ids=torch.zeros(3, dtype=torch.int64))
    lengths = []
    kept.due.append((replays.Kept(()), lambda: None))  # else it is not asked for
    kept.end_forward = lambda *, long: lengths.append(long)  # type: ignore[method-assign]
    engine.step()
    engine.canary.checks._owing = long
    engine.canary.checks.tail()
    assert lengths == [False, True]
    engine.close()


@pytest.mark.parametrize("how", ["a tick between", "a launch that failed"])
def test_a_clock_that_is_not_where_a_replay_expects_it_is_set(how: str) -> None:
    engine = Steady(2, launches=True)
    kept, state = repeat(engine, 1), engine.canary.state
    replayed = kept.replayed
    if how == "a tick between":  # as a comparison of a hit, ahead of its forward
        state.tick(engine.canary.step + 1)
    else:
        state.advance(engine.canary.step)  # on the host alone
    engine.step()
    assert kept.replayed == replayed + 1, "the tail alone"
    assert int(state.clock) == state.now
    engine.step()
    assert kept.replayed == replayed + 3
    assert int(state.clock) == state.now
    assert not engine.found()["faults"]
    engine.canary.check_everything()
    assert engine.canary.state.counters[0].sum() >= 0
    engine.close()


@pytest.mark.parametrize("wrong", [0, 1])
def test_what_a_scheduler_says_later_is_compared(monkeypatch: pytest.MonkeyPatch, wrong: int) -> None:
    """Of forwards that are launched one by one, and of those that are replayed."""
    engine = Steady(2, launches=True)
    assert engine.known is not None
    note, asked = engine.known.note, list[int]()

    def noted(names: Any, sent: Any) -> None:
        sent[1] ^= wrong if len(asked) > 2 else 0
        note(names, Later(lambda: asked.append(1) or sent))  # type: ignore[func-returns-value]

    monkeypatch.setattr(engine.known, "note", noted)
    kept = repeat(engine, 3)
    steps = len(asked)
    assert kept.replayed >= 6
    engine.canary.counter_reader.drain(engine.canary.step, 1.0)
    counters = engine.canary.state.counters
    assert int(counters[layout.COUNT_TOKENS_COMPARED]) == 2 * steps
    assert int(counters[layout.COUNT_TOKENS_LEFT_OUT]) == 0
    assert (engine.canary.verdict()[0] is State.VIOLATED) is bool(wrong)
    engine.close()


def test_what_nobody_launches_is_due() -> None:
    launched: list[int] = []
    known = KnownTokens(2, torch.device("cpu"))
    launches = known.launches(head=lambda: launched.append(1))
    for due in (True, False, True):
        launches.due = due
        launches.launch_head()
        launches.launch_head()
        assert not launches.due
    assert launched == [1, 1]


def test_batches_that_take_turns_are_captured_once_each() -> None:
    engine = Steady(3)
    views = [engine.view_of(count) for count in (1, 2, 3)]
    kept = engine.canary.checks.replays
    assert kept is not None
    for number in range(3 * (replays.REPEATS + 2)):
        engine.view = views[number % 3]
        engine.step()
        if number >= 3 * replays.REPEATS - 1:
            for _ in range(6):
                kept.capture()
    assert (kept.captured, kept.replayed) == (6, 12)
    engine.close()


def test_batches_that_take_turns_are_replayed_as_they_are_shown() -> None:
    """One of the same slots, with launches of its own, is another batch."""
    engine = Steady(2, launches=True)
    kept, view = repeat(engine, 1), engine.view
    replayed = kept.replayed
    assert view.launches is not None
    engine.view = replace(view, launches=replace(view.launches))
    engine.step()
    assert kept.replayed == replayed
    engine.view = view
    engine.step()
    assert kept.replayed == replayed + 2
    assert not engine.found()["faults"]
    engine.close()


def test_what_is_wrong_in_a_replayed_forward_is_a_violation() -> None:
    engine = Steady(2)
    assert repeat(engine, 4).replayed == 8
    engine.canary.state.groups[0].buffers.records[engine.slots[0], 1] ^= 4
    engine.step()
    engine.canary.counter_reader.drain(engine.canary.step, 1.0)
    assert engine.canary.verdict()[0] is State.VIOLATED
    engine.close()


def test_what_was_captured_and_replayed_is_reported() -> None:
    engine = Steady(2)
    kept = repeat(engine, 3)
    final = engine.canary.detach()
    assert final.captures == {"done": kept.captured, "failed": 0}
    assert final.replays == kept.replayed
    assert (kept.captured, kept.replayed) == (2, 6)


def test_a_capture_that_fails_is_counted_and_tried_no_more(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> None:
        raise RuntimeError("no graphs here")

    monkeypatch.setattr(replays, "REPEATS", 1)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", refuse)
    kept, made = replays.Replays(torch.device("cpu")), [[object()] for _ in range(2)]
    kept._stream = nullcontext()
    for one in made:
        kept.use(one, lambda: None)
    for one in made:
        kept.capture()
        assert kept.use(one, lambda: None) is None
    assert (kept.captured, kept.failed) == (0, 1)
    assert [record.message for record in caplog.records if "no graphs here" in record.message] != []
