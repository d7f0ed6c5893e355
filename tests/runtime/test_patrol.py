"""The patrol's suspicions are confirmed on the engine's stream or dropped."""

from __future__ import annotations

import time

from canary_kernels import layout
from canary_obs.records import Phase
from canary_obs.runtime.perturb.bytes import locate_byte
from canary_obs.runtime.scout import Errand, Scout


def turn(rig) -> None:
    """One advance with credit for everything."""
    patrol = rig.canary.patrol
    patrol._refilled -= 1e6
    patrol.advance(time.monotonic())
    rig.canary.pump.drain(rig.canary.step, 1.0)


def test_a_suspicion_that_does_not_hold_is_no_violation(make_rig, monkeypatch) -> None:
    rig = make_rig(patrol_budget="50%", idle_sweep=False)
    rig.run(60)
    group = rig.canary.state.groups[0]
    slot = int(rig.engine.scheduler.live_slots()[0])
    address = locate_byte(group.view.sources[0], slot, 3)
    send = Scout.send

    def compare_while_writing(scout: Scout, errand: Errand) -> None:
        # The bytes are being rewritten just while the scout reads them.
        address.flip(1)
        send(scout, errand)
        address.flip(1)

    runs = rig.canary.health.launched[0][layout.Phase.PATROL]
    monkeypatch.setattr(Scout, "send", compare_while_writing)
    turn(rig)
    assert rig.canary.health.launched[0][layout.Phase.PATROL] > runs
    assert rig.canary.pump.violations == 0
    assert not rig.canary.health.stalled


def test_a_suspicion_that_holds_is_counted_once_per_cycle(make_rig) -> None:
    rig = make_rig(patrol_budget="50%", idle_sweep=False)
    rig.run(60)
    group = rig.canary.state.groups[0]
    slot = int(rig.engine.scheduler.live_slots()[0])
    address = locate_byte(group.view.sources[0], slot, 3)
    address.flip(1)
    cycles = rig.canary.patrol.cycles
    while rig.canary.patrol.cycles == cycles:
        turn(rig)
    found = rig.canary.pump.violations
    address.flip(1)
    assert 1 <= found <= 2
    assert rig.canary.pump.sample.values[layout.lane(layout.Phase.PATROL, layout.Reason.KV_DATA)] == found


def test_what_the_scout_counts_is_in_the_snapshot_and_its_suspicions_are_not(make_rig) -> None:
    rig = make_rig(patrol_budget="50%", idle_sweep=False)
    rig.run(60)
    turn(rig)
    beside = rig.canary.patrol.counted
    final = rig.canary.detach()
    assert final.groups["full"].hashed[Phase.PATROL] >= beside[0][layout.COUNT_HASHED + 3] > 0
    assert not any(any(row[: layout.NUM_LANES]) for row in beside)


def test_a_kernel_that_leaves_no_trace_is_a_stall(make_rig, monkeypatch) -> None:
    rig = make_rig(patrol_budget="50%", idle_sweep=False)
    rig.run(30)
    monkeypatch.setattr("canary_obs.runtime.scout.compare_range", lambda *_: None)
    turn(rig)
    assert rig.canary.health.stalled == {(0, layout.Phase.PATROL)}


def test_on_a_gpu_a_turn_takes_one_part_of_an_errand(make_rig, monkeypatch) -> None:
    """The GPU's turns, on the CPU: whole cycles with no turn that does two things, and a fault found."""
    rig = make_rig(patrol_budget="1GB/s", idle_sweep=False, reuse_data=False)
    rig.run(60)
    patrol, done = rig.canary.patrol, []
    monkeypatch.setattr(patrol, "_on_cpu", False)
    for name in ("send", "report"):
        monkeypatch.setattr(Scout, name, noting(getattr(Scout, name), name, done))
    received = patrol._receive
    monkeypatch.setattr(patrol, "_receive", lambda timeout=0.0: received(timeout) and not done.append("back"))
    slot = int(rig.engine.scheduler.live_slots()[0])
    locate_byte(rig.canary.state.groups[0].view.sources[0], slot, 3).flip(1)
    cycles, turns = patrol.cycles, []
    while patrol.cycles < cycles + 2:
        patrol._credit = 1e9
        patrol.advance(time.monotonic())
        turns.append(tuple(done))
        done.clear()
    assert set(turns) == {("send",), ("report",), ("back",)}
    assert turns[:8] == 2 * [("send",), ("report",), ("back",)]
    rig.canary.pump.drain(rig.canary.step, 1.0)
    assert rig.canary.pump.violations == 2
    assert rig.canary.pump.sample.values[layout.lane(layout.Phase.PATROL, layout.Reason.KV_DATA)] == 2


def test_an_errand_under_way_is_waited_for_before_a_whole_cycle(make_rig, monkeypatch) -> None:
    rig = make_rig(patrol_budget="1GB/s", idle_sweep=False)
    rig.run(60)
    patrol = rig.canary.patrol
    monkeypatch.setattr(patrol, "_on_cpu", False)
    patrol._credit = 1e9
    patrol.advance(time.monotonic())
    assert patrol._scout.busy
    runs = patrol.counted[0][layout.COUNT_RUNS + layout.Phase.PATROL]
    patrol.whole_cycle()
    assert not patrol._scout.busy
    assert patrol.counted[0][layout.COUNT_RUNS + layout.Phase.PATROL] == runs + 1


def noting(method, name: str, done: list[str]):
    """The method, which also writes its name down."""

    def noted(*given) -> None:
        done.append(name)
        method(*given)

    return noted
