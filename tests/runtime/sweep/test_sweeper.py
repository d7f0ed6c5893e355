"""Every flipped bit of every cached slot is found by the next sweep; a pass accounts for every slot."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from canary_obs.errors import UnsupportedEngine
from canary_obs.records import (
    CancelSweep,
    PauseSweep,
    ResumeSweep,
    StartSweep,
    SweepProgress,
    SweepReport,
    Violations,
)
from canary_obs.runtime.device.byte_address import locate_byte
from canary_obs.transport.links import LocalLink
from canary_obs.vocabulary import Cause, Reason, State, SweepStatus, Trigger
from tests.links import OneThreadLink
from tests.oracles import records as oracle
from tests.sizes import sized

TRIALS = sized(500, 150)


def sweep_now(rig, **options: object) -> SweepProgress:
    """One demanded sweep from start to result."""
    sweeper, counter_reader = rig.canary.sweeper, rig.canary.counter_reader
    name = f"test-{sweeper.passes[Trigger.DEMAND]}"
    sweeper.request(StartSweep(id=name, **options), rig.canary.step)  # type: ignore[arg-type]
    while sweeper.running:
        sweeper.advance(0.01, counter_reader.next_sequence)
        rig.canary.reporter.send_violations(counter_reader.poll(rig.canary.step))
    assert sweeper.last is not None
    assert sweeper.last.id == name
    return sweeper.last


def messages(link: LocalLink, kind: type) -> list:
    found = []
    while (message := link.next_message(0.0)) is not None:
        if isinstance(message, kind):
            found.append(message)
    return found


def test_one_flipped_bit_anywhere_is_caught_by_the_next_sweep(make_rig) -> None:
    link = OneThreadLink(capacity=100_000)
    rig = make_rig(link=link, patrol_budget="off", reuse_data=False)
    rig.run(200)
    rig.finish_requests()
    cached = rig.canary._adapter.prefix_cache.cached("full", unlocked_only=False).slots.tolist()
    assert len(cached) > 200
    sources = rig.canary.state.groups[0].view.sources
    draw = random.Random(11)
    assert sweep_now(rig).status is SweepStatus.PASSED
    messages(link, Violations)
    for trial in range(TRIALS):
        source, slot = sources[trial % len(sources)], draw.choice(cached)
        address = locate_byte(source, slot, draw.randrange(source.slot_bytes))
        mask = 1 << draw.randrange(8)
        address.flip(mask)
        result = sweep_now(rig)
        address.flip(mask)
        assert (result.status, result.violations) == (SweepStatus.VIOLATED, 1)
        (row,) = [row for message in messages(link, Violations) for row in message.rows]
        assert (row.reason, row.slot, row.sweep_id) == (Reason.KV_DATA, slot, result.id)
        assert row.part is not None
        assert row.part.name == source.part.name
    assert sweep_now(rig).status is SweepStatus.PASSED


@pytest.mark.parametrize("unlocked_only", [False, True])
def test_a_pass_accounts_for_every_slot_while_the_cache_changes(make_rig, unlocked_only: bool) -> None:
    rig = make_rig(sweep_interval=3, sweep_budget_ms=0.001, unlocked_only=unlocked_only)
    rig.run(sized(500, 250))
    last = rig.canary.sweeper.last
    assert rig.canary.sweeper.passes[Trigger.INTERVAL] > sized(20, 10)
    assert last is not None
    assert last.status is SweepStatus.PASSED
    assert last.checked + sum(last.skipped.values()) == last.total
    assert rig.canary.counter_reader.violations == 0


def test_slots_evicted_during_a_sweep_are_skipped_and_counted(make_rig) -> None:
    rig = make_rig()
    rig.run(80)
    sweeper = rig.canary.sweeper
    sweeper.request(StartSweep(id="slow"), rig.canary.step)
    pending = sweeper._pass
    sweeper._pass = None
    rig.run(80)
    sweeper._pass = pending
    rig.run(20)
    assert sweeper.last is not None
    assert (sweeper.last.id, sweeper.last.status) == ("slow", SweepStatus.PASSED)
    assert sweeper.last.skipped[Cause.EVICTED] > 0
    assert rig.canary.counter_reader.violations == 0


def test_a_sweep_that_checked_nothing_says_so(make_rig) -> None:
    rig = make_rig()
    result = sweep_now(rig)
    assert (result.status, result.total, result.checked) == (SweepStatus.PASSED, 0, 0)
    assert result.error == "nothing was checked: no slot is cached"
    rig.run(30)
    rig.finish_requests()
    result = sweep_now(rig)
    assert result.checked
    assert result.error is None


def test_a_record_that_lost_its_link_is_found_without_reading_bytes(make_rig) -> None:
    link = OneThreadLink(capacity=100_000)
    rig = make_rig(link=link, patrol_budget="off")
    rig.run(80)
    rig.finish_requests()
    cached = rig.canary._adapter.prefix_cache.cached("full", unlocked_only=False)
    records = rig.canary.state.groups[0].buffers.records
    victim = int(cached.slots[cached.positions > 3][0])
    kept = records[victim].clone()
    record = oracle.Record.unpack(kept.tolist())
    records[victim] = torch.tensor(replace(record, chain=record.chain ^ 1).pack())
    assert sweep_now(rig, data=False).status is SweepStatus.VIOLATED
    rows = [row for message in messages(link, Violations) for row in message.rows]
    assert {row.reason for row in rows} == {Reason.CHAIN}
    assert victim in {row.slot for row in rows}
    records[victim] = 0
    result = sweep_now(rig, data=False)
    assert (result.status, result.checked) == (SweepStatus.VIOLATED, result.total)
    records[victim] = kept
    assert sweep_now(rig).status is SweepStatus.PASSED


def test_a_commanded_sweep_replaces_an_automatic_one(make_rig) -> None:
    link = OneThreadLink(capacity=100_000)
    rig = make_rig(link=link, sweep_budget_ms=0.001)
    rig.run(80)
    rig.canary.sweeper.begin_automatic(Trigger.INTERVAL, rig.canary.step)
    link.send_command(StartSweep(id="mine"))
    rig.run(50)
    ends = [m.progress for m in messages(link, SweepReport) if m.progress.status is not SweepStatus.RUNNING]
    assert [end.status for end in ends] == [SweepStatus.CANCELLED, SweepStatus.PASSED]
    assert ends[1].id == "mine"
    assert ends[1].trigger is Trigger.DEMAND


def test_a_sweep_can_be_cancelled_and_an_unknown_group_is_refused(make_rig) -> None:
    link = OneThreadLink(capacity=100_000)
    rig = make_rig(link=link, sweep_budget_ms=0.001)
    rig.run(80)
    link.send_command(StartSweep(id="a"))
    link.send_command(CancelSweep(id="a"))
    link.send_command(StartSweep(id="b", groups=("nope",)))
    rig.run(10)
    ends = {m.progress.id: m.progress for m in messages(link, SweepReport)}
    assert ends["a"].status is SweepStatus.CANCELLED
    assert ends["b"].status is SweepStatus.FAILED
    assert "there are: full" in str(ends["b"].error)


def test_idle_engine_sweeps_by_itself(make_rig) -> None:
    rig = make_rig(idle_sweep_seconds=1e-6)
    rig.run(100)
    rig.finish_requests()
    rounds = 0
    while rig.canary.sweeper.passes[Trigger.IDLE] < 2:
        rig.engine.idle()
        rounds += 1
        assert rounds < 1000
    assert rig.canary.counter_reader.violations == 0


def test_a_sweep_reports_the_share_of_each_group(make_rig) -> None:
    rig = make_rig(patrol_budget="off", reuse_data=False, idle_sweep=False)
    rig.run(80)
    rig.finish_requests()
    first = sweep_now(rig)
    slot = int(rig.canary._adapter.prefix_cache.cached("full", unlocked_only=False).slots[0])
    address = locate_byte(rig.canary.state.groups[0].view.sources[0], slot, 0)
    address.flip(1)
    second = sweep_now(rig)
    address.flip(1)
    for sweep, violations in ((first, 0), (second, 1)):
        (share,) = sweep.shares
        assert (share.group, share.total, share.checked) == ("full", sweep.total, sweep.checked)
        assert share.violations == sweep.violations == violations
        assert 0 <= share.began <= share.ended <= sweep.seconds


def test_an_engine_that_does_not_show_its_prefix_cache(make_rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise UnsupportedEngine("the scheduler does not report")

    rig = make_rig()
    rig.run(20)
    monkeypatch.setattr(rig.canary._adapter.prefix_cache, "cached", refuse)
    result = sweep_now(rig)
    assert (result.status, result.error, result.total) == (
        SweepStatus.FAILED, "the scheduler does not report", 0,
    )  # fmt: skip
    assert not rig.canary.sweeper.schedule.idle_due(0.0), "not asked again at once"
    assert rig.canary.verdict() == (State.DEGRADED, ("the last sweep failed: the scheduler does not report",))
    assert rig.canary.health.faults.total() == 0


def test_a_sweep_of_a_part_checks_that_part_and_resets_no_age(make_rig) -> None:
    rig = make_rig(patrol_budget="off", reuse_data=False, idle_sweep=False)
    rig.run(80)
    prefix_cache, sweeper = rig.canary._adapter.prefix_cache, rig.canary.sweeper
    every = prefix_cache.cached("full", unlocked_only=False).slots
    unused = prefix_cache.cached("full", unlocked_only=True).slots
    low, high = int(every.sort().values[10]), int(every.sort().values[-10])
    expected = {
        "all": every.numel(),
        "range": int(((every >= low) & (every <= high)).sum()),
        "used": every.numel() - unused.numel(),
    }
    assert 0 < expected["used"] < expected["all"]
    assert sweep_now(rig, first_slot=low, last_slot=high).total == expected["range"]
    assert sweep_now(rig, used_only=True).total == expected["used"]
    assert (sweeper.schedule.last_completed, sweeper.last_completed_ns) == (None, None)
    assert sweep_now(rig, data=False).total == expected["all"]
    assert sweeper.schedule.last_completed is None
    assert sweep_now(rig, groups=("full",)).total == expected["all"]
    assert sweeper.schedule.last_completed is not None


def test_damage_outside_a_range_is_not_met_and_inside_it_is(make_rig) -> None:
    rig = make_rig(patrol_budget="off", reuse_data=False, idle_sweep=False)
    rig.run(80)
    rig.finish_requests()
    slots = rig.canary._adapter.prefix_cache.cached("full", unlocked_only=False).slots.sort().values
    victim = int(slots[len(slots) // 2])
    address = locate_byte(rig.canary.state.groups[0].view.sources[0], victim, 0)
    address.flip(1)
    assert sweep_now(rig, last_slot=victim - 1).status is SweepStatus.PASSED
    assert sweep_now(rig, first_slot=victim, last_slot=victim).violations == 1
    address.flip(1)


def test_a_sweep_of_one_request_checks_its_cached_slots(make_rig) -> None:
    rig = make_rig(patrol_budget="off", reuse_data=False, idle_sweep=False)
    rig.run(80)
    adapter = rig.canary._adapter
    every = set(adapter.prefix_cache.cached("full", unlocked_only=False).slots.tolist())
    running = {request.id: request for request in rig.engine.scheduler.running}
    name, own = next(
        (name, own)
        for name, request in running.items()
        if (own := every & set(request.slots[: request.computed].tolist()))
    )
    assert sweep_now(rig, request=name).total == len(own)
    result = sweep_now(rig, request="nobody")
    assert (result.status, result.total) == (SweepStatus.FAILED, 0)
    assert "no running request has this name" in str(result.error)
    assert rig.canary.sweeper.schedule.error is None, "an operator's slip is no failure of the sweeps"


def test_a_sweep_is_held_until_it_is_resumed(make_rig) -> None:
    link = OneThreadLink(capacity=100_000)
    rig = make_rig(link=link, sweep_budget_ms=0.001, idle_sweep=False)
    rig.run(80)
    for command in (StartSweep(id="a"), PauseSweep(id="other"), PauseSweep(id="a")):
        link.send_command(command)
    rig.run(50)
    reports = [message.progress for message in messages(link, SweepReport)]
    assert [(report.status, report.paused) for report in reports] == [
        (SweepStatus.RUNNING, False),
        (SweepStatus.RUNNING, True),
    ]
    assert rig.canary.sweeper.held
    checked = rig.canary.sweeper.progress.checked
    rig.run(50)
    assert rig.canary.sweeper.progress.checked == checked
    link.send_command(ResumeSweep(id="a"))
    rig.run(100)
    assert messages(link, SweepReport)[-1].progress.status is SweepStatus.PASSED


def test_a_held_sweep_can_be_cancelled(make_rig) -> None:
    link = OneThreadLink(capacity=100_000)
    rig = make_rig(link=link, sweep_budget_ms=0.001, idle_sweep=False)
    rig.run(80)
    for command in (StartSweep(id="a"), PauseSweep(id="a"), CancelSweep(id="a")):
        link.send_command(command)
    rig.run(20)
    assert messages(link, SweepReport)[-1].progress.status is SweepStatus.CANCELLED
    assert not rig.canary.sweeper.held


def test_a_commands_budget_goes_before_the_setting(make_rig) -> None:
    rig = make_rig(sweep_budget_ms=0.001, idle_sweep=False, patrol_budget="off")
    rig.run(300)
    rig.finish_requests()
    sweeper, counter_reader = rig.canary.sweeper, rig.canary.counter_reader
    for name, budget in (("slow", None), ("fast", 1000.0)):
        sweeper.request(StartSweep(id=name, budget_ms=budget), rig.canary.step)
        sweeper.advance(1e-6, counter_reader.next_sequence)
        assert sweeper.ending is (budget is not None)
        sweeper.cancel(name)
        while sweeper.running:
            sweeper.advance(1.0, counter_reader.next_sequence)
            counter_reader.poll(rig.canary.step)
