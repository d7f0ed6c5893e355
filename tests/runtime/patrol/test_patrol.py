"""The patrol's suspicions are confirmed on the engine's stream or dropped."""

from __future__ import annotations

import time

import pytest

from canary_kernels import layout
from canary_obs.runtime.device.byte_address import locate_byte
from canary_obs.runtime.patrol import patrol as patrol_module
from canary_obs.runtime.patrol.async_checker import AsyncChecker, Return, ScanJob
from canary_obs.vocabulary import Phase


def turn(rig) -> None:
    """One advance with credit for everything."""
    patrol = rig.canary.patrol
    patrol._refilled -= 1e6
    patrol.confirm(patrol.advance())
    rig.canary.counter_reader.drain(rig.canary.step, 1.0)


def test_a_suspicion_that_does_not_hold_is_no_violation(make_rig, monkeypatch) -> None:
    rig = make_rig(patrol_budget="50%", idle_sweep=False)
    rig.run(60)
    group = rig.canary.state.groups[0]
    slot = int(rig.engine.scheduler.live_slots()[0])
    address = locate_byte(group.view.sources[0], slot, 3)
    send = AsyncChecker.send

    def compare_while_writing(scout: AsyncChecker, job: ScanJob) -> None:
        # The bytes are being rewritten just while the scout reads them.
        address.flip(1)
        send(scout, job)
        address.flip(1)

    runs = rig.canary.health.launched_runs[0][layout.Phase.PATROL]
    monkeypatch.setattr(AsyncChecker, "send", compare_while_writing)
    turn(rig)
    assert rig.canary.health.launched_runs[0][layout.Phase.PATROL] > runs
    assert rig.canary.counter_reader.violations == 0
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
    found = rig.canary.counter_reader.violations
    address.flip(1)
    assert 1 <= found <= 2
    assert (
        rig.canary.counter_reader.sample.values[layout.lane(layout.Phase.PATROL, layout.Reason.KV_DATA)]
        == found
    )


def test_what_the_scout_counts_is_in_the_snapshot_and_its_suspicions_are_not(make_rig) -> None:
    rig = make_rig(patrol_budget="50%", idle_sweep=False)
    rig.run(60)
    turn(rig)
    beside = rig.canary.state.side_counters
    assert beside[layout.COUNT_HASHED + layout.Phase.PATROL] > 0
    beside[layout.lane(layout.Phase.PATROL, layout.Reason.KV_DATA)] += 5
    final = rig.canary.detach()
    hashed = layout.COUNT_HASHED + layout.Phase.PATROL
    assert final.groups["full"].hashed[Phase.PATROL] == rig.canary.state.counters[hashed] + beside[hashed]
    assert (
        rig.canary.counter_reader.violations
        == sum(final.groups["full"].violations[Phase.PATROL].values())
        == 0
    )


def test_a_kernel_that_leaves_no_trace_is_a_stall(make_rig, monkeypatch) -> None:
    rig = make_rig(patrol_budget="50%", idle_sweep=False)
    rig.run(30)
    monkeypatch.setattr(rig.canary.patrol._checker, "_compare", [lambda _: None])
    turn(rig)
    assert rig.canary.health.stalled == {(0, layout.Phase.PATROL)}


class Late:
    """A stream whose work is done when it is told to be."""

    def __init__(self) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.done = True


class Away:
    """The patrol of a rig as on a GPU: errands run when they are sent, and their stream is done later."""

    def __init__(self, rig) -> None:
        self.canary, self.patrol = rig.canary, rig.canary.patrol
        self.patrol._on_cpu = False
        self.scout, self.stream = self.patrol._checker, Late()
        self.scout._stream = self.stream

    def send(self) -> bool:
        """Choose an errand and send it; False = neither."""
        self.patrol._credit = 1e9
        self.patrol.confirm(self.patrol.advance())
        if self.patrol._chosen is None:
            return False
        self.stream.done = False  # what is sent has to be done as well
        self.patrol.confirm(self.patrol.advance())
        return self.patrol._chosen is None

    def take(self) -> bool:
        """Take back what came; whether anything did."""
        self.patrol._credit, before = 0.0, len(self.scout._under_way)
        for _ in range(3):  # seen to be done, taken back, entered
            self.patrol.confirm(self.patrol.advance())
        return len(self.scout._under_way) < before

    def counter_reader(self) -> None:
        self.canary.counter_reader.poll(self.canary.step)


def returned(scout: AsyncChecker) -> list[Return]:
    scout.look()
    return scout.returned()


@pytest.fixture
def away(make_rig) -> Away:
    rig = make_rig(patrol_budget="1GB/s", idle_sweep=False, reuse_data=False)
    rig.run(60)
    return Away(rig)


def test_an_errand_returns_with_a_copy_pushed_after_it_was_done(away) -> None:
    assert away.send()
    away.counter_reader()  # this copy was pushed before it was done
    assert not away.take()
    away.stream.done = True
    assert not away.take()  # nor is the newest copy one pushed since
    away.counter_reader()
    assert away.scout.busy
    assert away.take()
    assert not away.scout.busy
    assert not away.canary.health.stalled


def test_what_was_chosen_at_rest_is_not_sent_beside_a_forward(make_rig, monkeypatch) -> None:
    """At rest an errand may be ten times as long, which a prefill would feel."""
    monkeypatch.setattr(patrol_module, "_CPU_CHUNK", 4)
    rig = make_rig(patrol_budget="50%", idle_sweep=False)
    rig.run(60)
    now = [time.monotonic()]
    monkeypatch.setattr(patrol_module.time, "monotonic", lambda: now[0])
    away = Away(rig)
    patrol, size = away.patrol, away.patrol._bytes_of
    patrol._timed, patrol._busy_share = False, 0.1
    patrol._rate = rate = 2.0 * sum(size(away.patrol._next(1)) for _ in away.patrol._chunks)
    patrol._cursor = 0
    patrol.rest()
    patrol.advance(idle=True)
    now[0] += 0.25
    patrol.advance(idle=True)
    chosen = patrol._chosen
    assert size(chosen) > 0.9 * rate * 0.25
    patrol.advance(idle=False)
    assert not away.scout.busy
    assert patrol._chosen.first_chunk == chosen.first_chunk  # nothing is passed over
    assert size(patrol._chosen) < 0.2 * rate * 0.25
    patrol.advance(idle=False)
    assert away.scout.busy


def test_a_long_forward_earns_no_rest(make_rig, monkeypatch) -> None:
    rig = make_rig(patrol_budget="50%", idle_sweep=False)
    now = [time.monotonic()]
    monkeypatch.setattr(patrol_module.time, "monotonic", lambda: now[0])
    patrol = Away(rig).patrol
    patrol._timed, patrol._busy_share, patrol._rate = False, 0.1, 1e6
    monkeypatch.setattr(patrol_module, "_JOB_SECONDS", 1e9)  # earns, and chooses nothing
    patrol.rest()
    for seconds, idle, earned in ((0.0, False, 0.0), (0.2, True, 2e4), (0.1, True, 1.2e5), (0.1, False, 1e5)):
        now[0] += seconds
        patrol.advance(idle=idle)
        assert patrol._credit == pytest.approx(earned)


def test_whole_cycles_find_what_is_corrupt(away) -> None:
    group = away.canary.state.groups[0]
    states = group.buffers.records[:, layout.IDENTITY] >> 32 & layout.STATE_MASK
    complete = (states == layout.RecordState.COMPLETE).nonzero()
    locate_byte(group.view.sources[0], int(complete[0]), 3).flip(1)
    cycles = away.patrol.cycles
    while away.patrol.cycles < cycles + 2:
        away.send()
        away.stream.done = True
        away.take()
        away.counter_reader()
    away.counter_reader()
    # At least once in each cycle; errands beside the one that counted it may be repeated as well.
    assert 2 <= away.canary.counter_reader.violations <= 3
    lane = layout.lane(layout.Phase.PATROL, layout.Reason.KV_DATA)
    assert away.canary.counter_reader.counters[lane] == away.canary.counter_reader.violations


def test_no_more_errands_than_a_few_are_under_way(away) -> None:
    sent = 0
    while away.send():
        sent += 1
        away.counter_reader()
    assert sent == 4
    assert away.scout.full
    away.stream.done = True
    assert not away.take()
    away.counter_reader()
    assert away.take()
    assert not away.scout.busy


def test_suspicions_counted_by_a_later_errand_are_not_lost(away) -> None:
    """The copy that brings the first errand home may hold what the second has counted: both are repeated."""
    group = away.canary.state.groups[0]
    first, second = (
        ScanJob(group=group, slots=range(start, start + 4), first_chunk=0, last_chunk=0) for start in (0, 4)
    )
    suspicions = away.canary.state.side_counters[layout.lane(layout.Phase.PATROL, layout.Reason.KV_DATA) :]
    away.scout.send(first)
    away.stream.done = True
    assert returned(away.scout) == []
    away.scout.send(second)
    away.stream.done = False
    suspicions[0] += 1  # by the second, which is still under way
    away.counter_reader()
    assert [(back.job, back.suspicious) for back in returned(away.scout)] == [(first, True)]
    away.stream.done = True
    assert returned(away.scout) == []
    away.counter_reader()
    assert [(back.job, back.suspicious) for back in returned(away.scout)] == [(second, True)]
    away.scout.send(first)
    assert [(back.ran, back.suspicious) for back in away.scout.finish()] == [(True, False)]


def test_a_run_that_left_no_trace_is_missed_once(away, monkeypatch) -> None:
    group = away.canary.state.groups[0]
    job = ScanJob(group=group, slots=range(4), first_chunk=0, last_chunk=0)
    with monkeypatch.context() as patch:
        patch.setattr(away.scout, "_compare", [lambda _: None])
        away.scout.send(job)
    away.scout.send(job)
    away.scout.send(job)
    away.stream.done = True
    assert returned(away.scout) == []
    away.counter_reader()
    # Which of the three left none is not known; that one is missing is.
    assert sorted(back.ran for back in returned(away.scout)) == [False, True, True]
    away.scout.send(job)
    assert [back.ran for back in away.scout.finish()] == [True]


def test_errands_under_way_are_waited_for_before_a_whole_cycle(away) -> None:
    assert away.send()
    assert away.scout.busy
    away.patrol.whole_cycle()
    assert not away.scout.busy
    assert away.patrol._arrived == 0


def test_a_scout_has_rooms_of_its_own(make_rig) -> None:
    """Sums that wait between two launches, the log and the clock: two streams write them at once."""
    rig = make_rig(model="int8", patrol_budget="50%")
    for group, (buffers, plan) in zip(
        rig.canary.state.groups, rig.canary.patrol._checker._sides, strict=True
    ):
        assert group.plan.scratch is not None
        pairs = [(plan.scratch, group.plan.scratch), (buffers.counters, group.buffers.counters)]
        pairs += [(buffers.violations, group.buffers.violations), (buffers.clock, group.buffers.clock)]
        assert all(mine.data_ptr() != theirs.data_ptr() for mine, theirs in pairs)
