"""Slots without a history leave `ok`, get a baseline in the background, and `ok` comes back by itself."""

from __future__ import annotations

import time

import pytest
import torch

from canary_kernels import layout
from canary_kernels.layout import RecordState
from canary_obs.attach import install_canary
from canary_obs.config import IN_PROCESS, CanaryConfig
from canary_obs.reference_engine import settings
from canary_obs.reference_engine.engine import Engine
from canary_obs.reference_engine.traffic import Traffic, scaled_traffic
from canary_obs.runtime import baselines as baselines_module, check_coverage
from canary_obs.runtime.report.snapshot import group_counters
from canary_obs.vocabulary import Cause, Reason, SlotState, State
from tests.runtime.conftest import Rig
from tests.unchecked import Report

WAIT = "adopted slots wait for a baseline"
SHARE = "slot checks of the last"


@pytest.fixture
def short_window(monkeypatch) -> None:
    monkeypatch.setattr(check_coverage, "WINDOW_SECONDS", 0.2)
    monkeypatch.setattr(check_coverage, "_SAMPLE_SECONDS", 0.0)


@pytest.fixture
def warm():
    """Makes an engine with a filled cache that gets its canary only then."""
    made: list[Rig] = []

    def make(model: str = "llama", **changes: object) -> Rig:
        engine = Engine(settings.with_model(settings.tiny(seed=3), model))
        rig = Rig(
            engine, Traffic(scaled_traffic(engine.config.max_context, engine.config.max_running), 3), None
        )
        rig.run(80)
        config = CanaryConfig(**({"endpoint": IN_PROCESS, "idle_sweep": False} | changes))
        rig.canary = install_canary(engine, config)
        rig.canary.mark_ready()
        made.append(rig)
        return rig

    yield make
    for rig in made:
        rig.canary.detach()


def states(rig: Rig, group: int = 0) -> list[int]:
    identity = rig.canary.state.groups[group].buffers.records[:, layout.IDENTITY]
    return ((identity >> 32) & layout.STATE_MASK).tolist()


def idle_until_ok(rig: Rig, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while rig.canary.verdict()[0] is not State.OK:
        rig.engine.idle()
        assert time.monotonic() < deadline, rig.canary.verdict()


@pytest.mark.parametrize("model", ["llama", "swa", "compressed"])
def test_an_engine_attached_warm_is_not_ok_until_its_baselines_are_taken(
    warm, short_window, unchecked: Report, model: str
) -> None:
    rig = warm(model)
    verdict = rig.canary.verdict()
    if model == "llama":
        unchecked("an engine is attached warm, and idle", "reference", verdict, names=WAIT, seconds=0.0)
    assert verdict[0] is State.DEGRADED
    assert WAIT in verdict[1][0]
    rig.finish_requests()
    idle_until_ok(rig)
    for group in rig.canary.state.groups:
        assert RecordState.ADOPTED not in states(rig, group.index)
    rig.canary.baselines._ended = float("-inf")  # a census is due
    rig.canary.check_everything()
    found = rig.canary.baselines.found["full"]
    assert (found[SlotState.ADOPTED], found[SlotState.AWAITED]) == (0, 0)
    assert found[SlotState.BASELINE] == states(rig).count(RecordState.BASELINE) > 0
    rig.run(60)
    rig.canary.check_everything()
    assert rig.canary.counter_reader.violations == 0


def test_later_damage_of_an_adopted_slot_is_seen(warm, short_window) -> None:
    rig = warm()
    rig.finish_requests()
    idle_until_ok(rig)
    slot = states(rig).index(RecordState.BASELINE)
    rig.engine.runner.pool.kv[0, 0, slot, 0, 0] += 1
    rig.canary.patrol.whole_cycle()
    rig.canary.delivery.drain(1.0)
    assert rig.canary.counter_reader.violations == 1


def test_an_engine_adopted_whole_after_a_fault(make_rig, short_window, unchecked: Report) -> None:
    rig = make_rig(idle_sweep=False)
    rig.run(60)
    assert rig.canary.verdict() == (State.OK, ())
    rig.canary.fault("step_view", RuntimeError("injected"))
    verdict = rig.canary.verdict()
    way = "every slot is adopted after a fault"
    unchecked(way, "reference", verdict, names=WAIT, seconds=0.0)
    rig.canary.health.faults.clear()
    rig.finish_requests()
    idle_until_ok(rig)
    assert RecordState.ADOPTED not in states(rig)


def test_traffic_over_adopted_slots_is_below_the_target(warm, unchecked: Report, monkeypatch) -> None:
    """Baselines are not taken, and nobody says so: what the checks met says it."""
    monkeypatch.setattr(baselines_module.Baselines, "due", False)
    monkeypatch.setattr(baselines_module.Baselines, "waiting", False)
    rig = warm(sweep_interval=4)
    started = time.monotonic()
    rig.run(12)
    seconds, verdict = time.monotonic() - started, rig.canary.verdict()
    unchecked("checks meet adopted slots", "reference", verdict, names=SHARE, seconds=seconds)
    counters = group_counters(rig.canary.state, rig.canary.counter_reader)["full"]
    (reason,) = [reason for reason in verdict[1] if SHARE in reason]
    assert int(reason.split()[0]) > 0
    assert counters.unverified[Cause.ADOPTED] >= int(reason.split()[0])


def test_a_baseline_kernel_that_does_not_run(warm, unchecked: Report, monkeypatch) -> None:
    monkeypatch.setattr(baselines_module, "baseline_range", lambda *_: None)
    rig = warm()
    rig.finish_requests()
    started = time.monotonic()
    for _ in range(200):
        rig.engine.idle()
        if rig.canary.verdict()[0] is State.BLIND:
            break
    seconds, names = time.monotonic() - started, "runs of the baseline kernel are missing"
    way = "baselines are launched and not taken"
    unchecked(way, "reference", rig.canary.verdict(), names=names, seconds=seconds)


def test_adopted_slots_whose_bytes_nothing_covers_stay_a_debt(warm, unchecked: Report) -> None:
    rig = warm(real_data="none", coverage_target=0.0, check_coverage_target=0.5)
    rig.finish_requests()
    started = time.monotonic()
    while rig.canary.baselines.waiting:
        rig.engine.idle()
    seconds, names = time.monotonic() - started, "adopted slots have no baseline"
    way = "no fingerprint covers adopted slots"
    unchecked(way, "reference", rig.canary.verdict(), names=names, seconds=seconds)
    rig.canary.check_coverage.acknowledge()
    assert rig.canary.verdict() == (State.OK, ())
    rig.run(10)
    assert rig.canary.verdict() == (State.OK, ()), "it was accepted, and became no more"
    rig.canary.state.groups[0].adopt(torch.arange(rig.engine.config.num_slots))
    assert WAIT in rig.canary.verdict()[1][0], "this is new"


def test_a_state_bit_of_a_record_that_flips_is_damage(make_rig, unchecked: Report) -> None:
    rig = make_rig(idle_sweep=False, patrol_budget="off")
    rig.run(60)
    assert rig.canary.verdict() == (State.OK, ())
    slot = states(rig).index(RecordState.COMPLETE)
    rig.canary.state.groups[0].buffers.records[slot, layout.IDENTITY] ^= 1 << 32  # complete -> adopted
    started = time.monotonic()
    rig.canary.check_everything()
    seconds, way = time.monotonic() - started, "a record's state flips from complete to adopted"
    unchecked(way, "reference", rig.canary.verdict(), names="violation not acknowledged", seconds=seconds)
    counters = group_counters(rig.canary.state, rig.canary.counter_reader)["full"]
    assert sum(row[Reason.RECORD] for row in counters.violations.values()) >= 1
    assert counters.unverified[Cause.ADOPTED] == 0


def test_a_clean_engine_is_never_accused(make_rig) -> None:
    rig = make_rig()
    seen = set()
    for _ in range(150):
        rig.run(1)
        seen.add(rig.canary.verdict())
    assert seen == {(State.OK, ())}
    assert not rig.canary.baselines.waiting
    assert rig.canary.baselines.found["full"][SlotState.BASELINE] == 0


def test_slots_adopted_during_a_pass_are_left_to_the_next(make_rig) -> None:
    rig = make_rig()
    rig.run(60)
    rig.finish_requests()
    baselines, group = rig.canary.baselines, rig.canary.state.groups[0]
    group.adopt(torch.tensor([5]))
    baselines.advance(0.0, rig.canary.counter_reader.next_sequence)  # one chunk: slot 5 is past
    group.adopt(torch.tensor([5]))
    idle_until_ok(rig)
    assert states(rig)[5] == RecordState.BASELINE
