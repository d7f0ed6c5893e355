"""What is compared while the last forward runs is what would have been compared before the next one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from canary_kernels import layout
from canary_obs.runtime.device import replays
from canary_obs.vocabulary import State
from tests.runtime.steady import Steady
from tests.runtime.test_replays import EVENTS, repeat, run


@settings(max_examples=25)
@given(
    st.lists(st.sampled_from(EVENTS), min_size=4, max_size=20),
    st.sampled_from(["torch", "numba"]),
    st.booleans(),
    st.sampled_from([None, 3]),
)
def test_records_and_findings_are_the_same(
    events: list[str], backend: str, replaying: bool, window: int | None
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replays, "REPEATS", 2)
        patch.setattr(replays, "FORWARDS_WAITED", 0)
        early = run(events, replaying=replaying, backend=backend, early=True, window=window)
    assert early[0] == run(events, replaying=False, backend=backend, window=window)[0]


def test_a_flip_is_found_by_the_early_comparison_with_its_forwards_number() -> None:
    engine = Steady(2)
    for _ in range(3):
        engine.step()
    engine.length -= 1  # the last slots again
    engine.memory[1, 0, int(engine.slots[1]), 0, 3] ^= 1
    engine.step(early=True)
    assert engine.compared_early == 1
    engine.canary.check_everything()
    log = engine.canary.state.groups[0].buffers.violations
    first, *rest = log[layout.lane(layout.Phase.HEAD, layout.Reason.KV_DATA)].tolist()
    assert first[layout.ROW_SLOT] == int(engine.slots[1])
    assert first[layout.ROW_STEP] >> layout.TICK_BITS == 4
    assert not any(row[layout.ROW_EVENT] for row in rest)
    assert not any("not checked" in reason for reason in engine.canary.verdict()[1])  # as many as were given
    engine.close()


@pytest.fixture
def engine() -> Any:
    steady = Steady(2)
    for _ in range(3):
        steady.step(early=True)
    # Not in the first, before which nothing was shown, nor after a pass over all records.
    assert steady.compared_early == 1
    yield steady
    steady.close()


def may(steady: Steady, view: Any = None) -> bool:
    """As the next forward's hook would ask."""
    steady.adapter.counted["full"] += 1
    found = steady.canary.may_compare_early(view or steady.view)
    steady.adapter.counted["full"] -= 1
    return found


def copied_later(canary: Any) -> None:
    """A copy of the counters is under way, as on a GPU."""
    canary.counter_reader.delayed = True
    canary.counter_reader.push(canary.step)
    canary.counter_reader.delayed = False


SLOTS = torch.tensor([7, 9])


@pytest.mark.parametrize(
    "change",
    [
        lambda canary: canary.invalidated("full", SLOTS),
        lambda canary: canary.awaited("full", SLOTS),
        lambda canary: canary.received("full", SLOTS),
        lambda canary: canary.copied("full", SLOTS, SLOTS + 20),
        lambda canary: canary.records_of("full", SLOTS) is None or canary.state.groups[0].store(
            SLOTS, canary.records_of("full", SLOTS)
        ),
        lambda canary: canary.fault("step_view", ValueError("made up")),
        lambda canary: canary.check_everything(),
        lambda canary: canary.state.tick(),
        lambda canary: copied_later(canary),
    ],
    ids=["invalidated", "awaited", "received", "copied", "stored", "fault", "sweep", "tick", "counters"],
)  # fmt: skip
def test_not_after_anything_else_that_concerns_records(engine: Steady, change: Any) -> None:
    assert may(engine)
    change(engine.canary)
    assert not may(engine)
    for _ in range(2):  # after a fault, a pass over all records follows
        engine.step()
    assert may(engine)


def test_not_for_another_view_nor_while_one_is_under_way(engine: Steady) -> None:
    assert not may(engine, engine.view_of(1))
    engine.adapter.counted["full"] += 1
    engine.canary.before_write(engine.view)
    assert not may(engine)
    engine.canary.forward_launched(engine.view)
    engine.canary.after_forward(engine.view)
    assert may(engine)


def test_not_where_a_forward_was_missed(engine: Steady) -> None:
    engine.adapter.counted["full"] += 1  # and not shown
    assert not may(engine)
    engine.step(early=True)
    assert engine.compared_early == 1
    assert engine.canary.verdict()[0] is State.BLIND


def test_not_while_faults_are_injected() -> None:
    steady = Steady(2, perturb="real_kv_used=0.2", perturb_enabled=True)
    for _ in range(2):
        steady.step()
    assert not may(steady)
    steady.close()


def test_a_forward_that_fails_after_it_leaves_the_clock_right(engine: Steady) -> None:
    repeat(engine, 2)
    engine.adapter.counted["full"] += 1
    engine.canary.before_write(engine.view, engine.slots.clone())
    engine.canary.forward_failed(engine.view)
    engine.canary.after_step()
    for _ in range(replays.REPEATS + 2):
        engine.step(early=True)
        state = engine.canary.state
        assert (int(state.clock[0]), state.clock_set) == (state.now, True)
    assert not engine.canary.health.faults


def test_an_announcement_between_head_and_tail_finds_the_clock_set(engine: Steady) -> None:
    for _ in range(replays.REPEATS + replays.FORWARDS_WAITED + 2):
        engine.step(early=True)
    clocks = []

    def announce(slots: Any) -> None:
        engine.canary.invalidated("full", slots[:1])
        clocks.append((int(engine.canary.state.clock[0]), engine.canary.state.now))

    replayed = engine.canary.checks.replays
    assert replayed is not None
    before, compared = replayed.replayed, engine.compared_early
    engine.step(early=True)
    engine.step(early=True)
    assert replayed.replayed == before + 2  # the rest of it, with the clock
    assert engine.compared_early == compared + 2
    engine.step(early=True, between=announce)
    assert replayed.replayed == before + 2
    assert clocks[0][0] == clocks[0][1]
