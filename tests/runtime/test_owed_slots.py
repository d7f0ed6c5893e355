"""Byte checks that do not run: the slots they were given are missing in the counters."""

from __future__ import annotations

import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from canary_kernels import layout
from canary_obs.engine_api.views import GroupStep
from canary_obs.runtime import announcements, forward
from canary_obs.runtime.device.owed_slots import OwedSlots
from canary_obs.runtime.patrol import patrol
from canary_obs.runtime.sweep import sweeper
from canary_obs.vocabulary import State, SweepStatus
from tests.sizes import sized
from tests.unchecked import Report

NOT_CHECKED = "bytes were not checked"


def nothing(*_: object, **__: object) -> None:
    """A kernel that is not launched."""


@pytest.mark.parametrize("model", ["llama", "swa", *sized(["compressed"], [])])
def test_a_clean_engine_owes_nothing(make_rig, model: str) -> None:
    rig = make_rig(model=model, patrol_budget="50%", sweep_interval=3, prefix_data=True)
    rig.run(60)
    rig.finish_requests()
    rig.canary.check_everything()
    assert rig.canary.verdict() == (State.OK, ())
    for row in rig.canary.state.counters.view(-1, layout.COUNTER_WORDS):
        assert row[layout.COUNT_COMPLETED] > 0


def test_forwards_of_changing_batches_between_two_copies_owe_nothing(make_rig) -> None:
    """As on a GPU, where a copy of the counters is made every sixth step."""
    rig = make_rig(model="swa", patrol_budget="off", idle_sweep=False)
    rig.run(5)
    rig.canary._scheduler._rotating = True
    rig.run(60)
    rig.finish_requests()
    rig.canary.check_everything()
    assert rig.canary.verdict() == (State.OK, ())


@pytest.mark.parametrize("backend", ["torch", "numba"])
@pytest.mark.parametrize(
    ("way", "module", "name", "check"),
    [
        ("bytes about to be overwritten are not compared", forward, "compare_slots", "head comparison"),
        ("new slots are not fingerprinted", forward, "complete_slots", "fingerprinting of new slots"),
    ],
)
def test_a_byte_check_around_a_forward_that_does_not_run(
    make_rig, unchecked: Report, monkeypatch: pytest.MonkeyPatch, way: str, module: object, name: str,
    check: str, backend: str,
) -> None:  # fmt: skip
    rig = make_rig(backend=backend, idle_sweep=False, patrol_budget="off")
    rig.run(60)
    assert rig.canary.verdict() == (State.OK, ())
    monkeypatch.setattr(module, name, nothing)
    started = time.monotonic()
    rig.run(3)
    verdict, seconds = rig.canary.verdict(), time.monotonic() - started
    names = f"{NOT_CHECKED}: {check}, group full"
    unchecked(way, "reference", verdict, names=names, seconds=seconds)
    rig.canary.state.owed.acknowledge()
    assert not any(NOT_CHECKED in reason for reason in rig.canary.verdict()[1])  # each is reported once


def test_a_layer_that_is_not_compared(make_rig, unchecked: Report, monkeypatch) -> None:
    rig = make_rig(idle_sweep=False, patrol_budget="off", layer_data=True)
    rig.run(20)
    monkeypatch.setattr(forward, "check_layer", nothing)
    started = time.monotonic()
    rig.run(2)
    unchecked(
        "layers are not compared with before", "reference", rig.canary.verdict(),
        names=f"{NOT_CHECKED}: comparison of one layer with before, group full",
        seconds=time.monotonic() - started,
    )  # fmt: skip


def test_a_reuse_check_of_the_first_group_only(make_rig, unchecked: Report, monkeypatch) -> None:
    rig = make_rig(model="swa", idle_sweep=False, patrol_budget="off")
    compare = forward.compare_slots

    def first_only(*arguments: object, **options: bool) -> None:
        if arguments[1] is rig.canary.state.groups[0].buffers:
            compare(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(forward, "compare_slots", first_only)
    started = time.monotonic()
    rig.run(3)
    verdict, seconds = rig.canary.verdict(), time.monotonic() - started
    second = rig.canary.state.groups[1].name
    unchecked(
        "the reuse check leaves out a group", "reference", verdict,
        names=f"{NOT_CHECKED}: head comparison, group {second}", seconds=seconds,
    )  # fmt: skip
    assert len(verdict[1]) == 1


def test_half_of_the_slots_are_not_compared(make_rig, monkeypatch) -> None:
    rig = make_rig(idle_sweep=False, patrol_budget="off")
    rig.run(60)
    compare = forward.compare_slots
    left_out: list[int] = []

    def half(backend: object, buffers: object, plan: object, slots, phase: object, **options: bool) -> None:
        left_out.append(slots.shape[0] - slots.shape[0] // 2)
        compare(backend, buffers, plan, slots[: slots.shape[0] // 2], phase, **options)

    monkeypatch.setattr(forward, "compare_slots", half)
    rig.run(5)
    reason = f"{NOT_CHECKED}: head comparison, group full, {sum(left_out)} slots"
    assert rig.canary.verdict() == (State.BLIND, (reason,))


def test_prefix_bytes_that_are_not_compared(make_rig, unchecked: Report, monkeypatch) -> None:
    rig = make_rig(idle_sweep=False, patrol_budget="off", prefix_data=True)
    rig.run(30)
    compare = forward.compare_slots

    def at_the_head(*arguments: object, **options: bool) -> None:
        if arguments[-1] is layout.Phase.HEAD:
            compare(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(forward, "compare_slots", at_the_head)
    started = time.monotonic()
    rig.run(3)
    unchecked(
        "prefix bytes are not compared", "reference", rig.canary.verdict(),
        names=f"{NOT_CHECKED}: tail comparison, group full", seconds=time.monotonic() - started,
    )  # fmt: skip


def sweep(rig) -> None:
    rig.finish_requests()
    rig.canary.check_everything()


@pytest.mark.parametrize("broken", ["all", "one slot of each chunk"])
def test_a_sweep_whose_bytes_are_not_compared_fails(
    make_rig, unchecked: Report, monkeypatch, broken: str
) -> None:
    rig = make_rig(idle_sweep=False, patrol_budget="off")
    rig.run(120)
    sweep(rig)
    assert rig.canary.sweeper.last.status is SweepStatus.PASSED
    compare = sweeper.compare_slots

    def one_less(backend, buffers, plan, slots, phase) -> None:
        compare(backend, buffers, plan, slots[1:], phase)

    monkeypatch.setattr(sweeper, "compare_slots", nothing if broken == "all" else one_less)
    started = time.monotonic()
    sweep(rig)
    verdict, seconds = rig.canary.verdict(), time.monotonic() - started
    last = rig.canary.sweeper.last
    assert last.status is SweepStatus.FAILED
    assert "were not compared" in str(last.error)
    assert any(last.error in reason for reason in verdict[1])
    if broken == "all":
        unchecked(
            "a sweep's bytes are not compared", "reference", verdict,
            names=f"{NOT_CHECKED}: sweep comparison, group full", seconds=seconds,
        )  # fmt: skip


def test_a_sweep_notices_bytes_that_nobody_owed(make_rig, monkeypatch) -> None:
    """Also when the slots are left out of what is owed: the kernel that reads records counts them."""
    rig = make_rig(idle_sweep=False, patrol_budget="off")
    rig.run(120)
    monkeypatch.setattr(sweeper, "compare_slots", nothing)
    monkeypatch.setattr(rig.canary.state.owed, "compared", nothing)
    sweep(rig)
    verified = rig.canary.sweeper.last.checked
    assert verified > 0
    assert rig.canary.sweeper.last.error == f"bytes of {verified} of {verified} slots were not compared"


def test_a_patrol_that_compares_less_than_its_ranges(make_rig, unchecked: Report, monkeypatch) -> None:
    rig = make_rig(patrol_budget="50%", idle_sweep=False)
    rig.run(30)
    checker = rig.canary.patrol._checker
    compare = checker._compare[0]
    monkeypatch.setattr(checker, "_compare", [lambda slots: compare(range(slots.start, slots.stop - 1))])
    started, ages = time.monotonic(), list(rig.canary.patrol._checked_at)
    rig.run(60)
    verdict, seconds = rig.canary.verdict(), time.monotonic() - started
    unchecked(
        "the patrol compares less than it passes", "reference", verdict,
        names=f"{NOT_CHECKED}: patrol comparison, group full", seconds=seconds,
    )  # fmt: skip
    # No chunk of those counts as checked, and the oldest of them tells.
    assert rig.canary.patrol._checked_at == ages
    assert rig.canary.patrol.oldest_check_seconds >= time.monotonic() - max(ages) - 1e-3


def test_confirmed_jobs_are_owed(make_rig, unchecked: Report, monkeypatch) -> None:
    rig = make_rig(patrol_budget="50%", idle_sweep=False)
    rig.run(30)
    monkeypatch.setattr(patrol, "compare_range", nothing)
    started = time.monotonic()
    rig.canary.patrol.whole_cycle()
    rig.run(2)
    unchecked(
        "a suspicious range is not compared again", "reference", rig.canary.verdict(),
        names=f"{NOT_CHECKED}: patrol comparison, group full", seconds=time.monotonic() - started,
    )  # fmt: skip


def test_received_bytes_that_are_not_compared(make_rig, unchecked: Report, monkeypatch) -> None:
    rig = make_rig(idle_sweep=False, patrol_budget="off")
    rig.run(30)
    group = rig.canary.state.groups[0]
    slots = group.slots_between(0, 8)
    monkeypatch.setattr(announcements, "compare_slots", nothing)
    started = time.monotonic()
    rig.canary.received("full", slots, group.records_of(slots))
    rig.run(2)
    unchecked(
        "received bytes are not compared", "reference", rig.canary.verdict(),
        names=f"{NOT_CHECKED}: head comparison, group full, 8 slots", seconds=time.monotonic() - started,
    )  # fmt: skip


def test_a_failed_forward_owes_no_fingerprints(make_rig) -> None:
    rig = make_rig(idle_sweep=False, patrol_budget="off")
    rig.run(20)
    model = rig.engine.runner.model
    healthy = model.forward
    model.forward = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        rig.run(1)
    model.forward = healthy
    assert not any("bytes were not checked" in reason for reason in rig.canary.verdict()[1])


def test_each_copy_is_compared_with_what_was_given_before_it(make_rig) -> None:
    """A copy that was skipped, or is processed late, must not be measured by another one's sum."""
    rig = make_rig(idle_sweep=False, patrol_budget="off")
    rig.run(5)
    owed, counters = rig.canary.state.owed, rig.canary.state.counters.view(1, -1)
    first = counters.clone()
    owed.expect(1000)
    owed.compared(0, layout.Phase.HEAD, 7)
    owed.expect(1001)
    counters[0, layout.COUNT_UNHASHED + layout.Phase.HEAD] += 7
    second = counters.clone()
    owed.expect(1002)
    owed.reconcile(1000, first.numpy())
    assert owed.reasons() == []
    owed.reconcile(1002, second.numpy())
    assert owed.reasons() == []
    owed.expect(1003)
    owed.reconcile(1003, first.numpy())
    assert owed.reasons() == [(State.BLIND, f"{NOT_CHECKED}: head comparison, group full, 7 slots")]


class TestOfCopies:
    """Two copies of the counters under way at once."""

    @staticmethod
    def counters(hashed: int) -> np.ndarray:
        rows = np.zeros((1, layout.COUNTER_WORDS), dtype=np.int64)
        rows[0, layout.COUNT_HASHED + layout.Phase.SWEEP] = hashed
        return rows

    def test_a_copy_that_was_never_processed_is_passed_over(self) -> None:
        owed = OwedSlots(("full",))
        owed.expect(1)
        owed.compared(0, layout.Phase.SWEEP, 5)
        owed.expect(2)
        owed.reconcile(2, self.counters(5))
        owed.reconcile(1, self.counters(0))
        assert not owed.reasons()

    def test_what_is_missing_is_reported_once(self) -> None:
        owed = OwedSlots(("full",))
        owed.compared(0, layout.Phase.SWEEP, 5)
        for sequence in (1, 2):
            owed.expect(sequence)
        for sequence in (1, 2):
            owed.reconcile(sequence, self.counters(2))
        owed.expect(3)
        owed.reconcile(3, self.counters(2))
        ((state, reason),) = owed.reasons()
        assert (state, reason) == (
            State.BLIND,
            "bytes were not checked: sweep comparison, group full, 3 slots",
        )


def test_steps_that_are_exchanged_in_place_are_shown(make_rig) -> None:
    """An adapter may keep one mapping of its groups and put other tensors into it."""
    checks, table = make_rig().canary.checks, torch.zeros((1, 1), dtype=torch.int64)
    steps = {}
    for slots in (torch.arange(2), torch.arange(3)):
        steps["full"] = GroupStep(slot_table=table, out_slots=slots)
        assert checks._show(SimpleNamespace(groups=steps)).groups[0][1] is slots
