"""The checks of a batch that repeats, launched as one, do what they do one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from canary_obs.runtime.device import replays
from canary_obs.vocabulary import State
from tests.runtime.steady import Steady

EVENTS = ("nothing", "nothing", "flip", "chain", "fed", "lost", "invalidated", "again")


def run(events: list[str], *, replaying: bool, backend: str, device: str = "cpu") -> tuple[Any, int]:
    """What is found, and how many forwards were replayed."""
    engine = Steady(3, device, backend=backend)
    if not replaying:
        engine.canary._checks.replays = None
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
            between=forget if event == "invalidated" else None, fed=int(event == "fed"), lost=event == "lost"
        )
    found, kept = engine.found(), engine.canary._checks.replays
    engine.close()
    return found, 0 if kept is None else kept.replayed


@settings(deadline=None, max_examples=25)
@given(st.lists(st.sampled_from(EVENTS), min_size=4, max_size=20), st.sampled_from(["torch", "numba"]))
def test_records_and_findings_are_those_of_launches_one_by_one(events: list[str], backend: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replays, "REPEATS", 2)
        replayed = run(events, replaying=True, backend=backend)
    assert replayed[0] == run(events, replaying=False, backend=backend)[0]
    assert replayed[1] == sum(event != "invalidated" for event in events[2:])


def test_a_forward_that_fails_leaves_no_launch_behind() -> None:
    engine = Steady(2)
    for _ in range(replays.REPEATS + 2):
        engine.step()
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
    for _ in range(replays.REPEATS + 2):
        engine.step()
    written = engine.canary.state.groups[0].buffers.records
    engine.lens.fill_(engine.length)
    engine.positions.fill_(engine.length)
    engine.slots.add_(1)
    engine.adapter.counted["full"] += 1
    before = written[engine.slots].clone()
    engine.canary.before_forward(engine.view)
    assert not torch.equal(written[engine.slots], before)
    engine.canary.after_forward(engine.view)
    assert engine.canary._checks.replays is None
    engine.close()


def test_as_many_batches_are_kept_as_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """By last use: one that is shown again in between stays."""
    monkeypatch.setattr(replays, "KEPT", 3)
    monkeypatch.setattr(replays, "REPEATS", 1)
    kept, made = replays.Replays(torch.device("cpu")), [object() for _ in range(5)]
    batches: list[Any] = [[one] for one in made]
    for one in (*batches[:3], batches[0], *batches[3:]):
        kept.note(one, lambda: None)
    assert [kept.find(one) is not None for one in batches] == [True, False, False, True, True]
    assert kept.captured == 5


def test_batches_that_take_turns_are_captured_once_each() -> None:
    engine = Steady(3)
    views = [engine.view_of(count) for count in (1, 2, 3)]
    for number in range(3 * (replays.REPEATS + 2)):
        engine.view = views[number % 3]
        engine.step()
    kept = engine.canary._checks.replays
    assert kept is not None
    assert (kept.captured, kept.replayed) == (3, 6)
    engine.close()


def test_what_is_wrong_in_a_replayed_forward_is_a_violation() -> None:
    engine = Steady(2)
    for _ in range(replays.REPEATS + 4):
        engine.step()
    assert engine.canary._checks.replays is not None
    assert engine.canary._checks.replays.replayed == 4
    engine.canary.state.groups[0].buffers.records[engine.slots[0], 1] ^= 4
    engine.step()
    engine.canary.counter_reader.drain(engine.canary.step, 1.0)
    assert engine.canary.verdict()[0] is State.VIOLATED
    engine.close()
