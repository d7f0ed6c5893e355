"""Suspicious jobs of the patrol are confirmed on the engine's stream, or dropped."""

from __future__ import annotations

import time

import pytest

from canary_kernels import layout
from canary_obs.runtime.device.byte_address import locate_byte
from canary_obs.runtime.patrol import patrol as patrol_module
from canary_obs.runtime.patrol.async_checker import AsyncChecker, ScanJob, ScanResult
from canary_obs.vocabulary import Phase


def advance(rig) -> None:
    """One advance with credit for everything."""
    patrol = rig.canary.patrol
    patrol._credited_at -= 1e6
    patrol.confirm(patrol.advance())
    rig.canary.counter_reader.drain(rig.canary.step, 1.0)


def test_an_unconfirmed_suspicion_is_no_violation(make_rig, monkeypatch) -> None:
    rig = make_rig(patrol_budget="50%", idle_sweep=False)
    rig.run(60)
    group = rig.canary.state.groups[0]
    slot = int(rig.engine.scheduler.live_slots()[0])
    address = locate_byte(group.view.sources[0], slot, 3)
    submit = AsyncChecker.submit

    def compare_while_writing(checker: AsyncChecker, job: ScanJob) -> None:
        # The bytes are being rewritten while the checker reads them.
        address.flip(1)
        submit(checker, job)
        address.flip(1)

    runs = rig.canary.health.launched_runs[0][layout.Phase.PATROL]
    monkeypatch.setattr(AsyncChecker, "submit", compare_while_writing)
    advance(rig)
    assert rig.canary.health.launched_runs[0][layout.Phase.PATROL] > runs
    assert rig.canary.counter_reader.violations == 0
    assert not rig.canary.health.stalled


def test_a_confirmed_suspicion_is_counted_once_per_cycle(make_rig) -> None:
    rig = make_rig(patrol_budget="50%", idle_sweep=False)
    rig.run(60)
    group = rig.canary.state.groups[0]
    slot = int(rig.engine.scheduler.live_slots()[0])
    address = locate_byte(group.view.sources[0], slot, 3)
    address.flip(1)
    cycles = rig.canary.patrol.cycles
    while rig.canary.patrol.cycles == cycles:
        advance(rig)
    found = rig.canary.counter_reader.violations
    address.flip(1)
    assert 1 <= found <= 2
    assert (
        rig.canary.counter_reader.sample.values[layout.lane(layout.Phase.PATROL, layout.Reason.KV_DATA)]
        == found
    )


def test_side_counters_are_in_the_snapshot_without_their_violations(make_rig) -> None:
    rig = make_rig(patrol_budget="50%", idle_sweep=False)
    rig.run(60)
    advance(rig)
    side = rig.canary.state.side_counters
    assert side[layout.COUNT_HASHED + layout.Phase.PATROL] > 0
    side[layout.lane(layout.Phase.PATROL, layout.Reason.KV_DATA)] += 5
    final = rig.canary.detach()
    hashed = layout.COUNT_HASHED + layout.Phase.PATROL
    assert final.groups["full"].hashed[Phase.PATROL] == rig.canary.state.counters[hashed] + side[hashed]
    assert (
        rig.canary.counter_reader.violations
        == sum(final.groups["full"].violations[Phase.PATROL].values())
        == 0
    )


def test_a_kernel_that_does_not_run_is_stalled(make_rig, monkeypatch) -> None:
    rig = make_rig(patrol_budget="50%", idle_sweep=False)
    rig.run(30)
    monkeypatch.setattr(rig.canary.patrol._checker, "_compare", [lambda _: None])
    advance(rig)
    assert rig.canary.health.stalled == {(0, layout.Phase.PATROL)}


def test_slots_counted_without_a_run_are_stalled(make_rig, monkeypatch) -> None:
    """A kernel counts both: one without the other is not the kernel."""
    rig = make_rig(patrol_budget="50%", idle_sweep=False)
    rig.run(30)
    side = rig.canary.state.side_counters

    def count(slots: range) -> None:
        side[layout.COUNT_HASHED + layout.Phase.PATROL] += len(slots)

    monkeypatch.setattr(rig.canary.patrol._checker, "_compare", [count])
    advance(rig)
    assert rig.canary.health.stalled == {(0, layout.Phase.PATROL)}


def test_one_chunk_does_not_refresh_the_ages_of_others(make_rig, monkeypatch) -> None:
    """The oldest check is that of the chunk checked longest ago, and of one that was left out."""
    monkeypatch.setattr(patrol_module, "_CPU_CHUNK", 4)
    rig = make_rig(patrol_budget="50%", idle_sweep=False)
    patrol, now = rig.canary.patrol, [1000.0]
    monkeypatch.setattr(patrol_module.time, "monotonic", lambda: now[0])
    patrol._chunks = [chunk for chunk in patrol._chunks if chunk[1] < 16]
    patrol._group_ends[0] = len(patrol._chunks)
    patrol._checked_at = [now[0]] * len(patrol._chunks)
    patrol._cursor = patrol._checked = 0

    def check(*, ran: bool) -> None:
        patrol._apply([ScanResult(patrol._next_job(1), ran, 0, False)])

    now[0] += 10
    check(ran=True)
    assert patrol.oldest_check_seconds == 10
    check(ran=False)
    check(ran=True)
    check(ran=True)
    now[0] += 5
    assert patrol.oldest_check_seconds == 15  # the second chunk was left out
    check(ran=True)
    assert patrol.oldest_check_seconds == 15
    check(ran=True)
    assert patrol.oldest_check_seconds == 5


class FakeStream:
    """A stream whose work is done when the test says so."""

    def __init__(self) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.done = True


class AsyncPatrol:
    """The patrol of a rig as on a GPU: jobs run when submitted, and their stream is done later."""

    def __init__(self, rig) -> None:
        self.canary, self.patrol = rig.canary, rig.canary.patrol
        self.patrol._on_cpu = False
        self.checker, self.stream = self.patrol._checker, FakeStream()
        self.checker._stream = self.stream

    def submit(self) -> bool:
        """Choose a job and submit it; False = neither."""
        self.patrol._credit = 1e9
        self.patrol.confirm(self.patrol.advance())
        if self.patrol._chosen is None:
            return False
        self.stream.done = False
        self.patrol.confirm(self.patrol.advance())
        return self.patrol._chosen is None

    def collect(self) -> bool:
        """Fetch and apply results; returns whether there were any."""
        self.patrol._credit, before = 0.0, len(self.checker._in_flight)
        for _ in range(3):  # see that jobs are done, fetch results, apply them
            self.patrol.confirm(self.patrol.advance())
        return len(self.checker._in_flight) < before

    def copy_counters(self) -> None:
        self.canary.counter_reader.poll(self.canary.step)


def results(checker: AsyncChecker) -> list[ScanResult]:
    checker.poll()
    return checker.results()


@pytest.fixture
def on_gpu(make_rig) -> AsyncPatrol:
    rig = make_rig(patrol_budget="1GB/s", idle_sweep=False, reuse_data=False)
    rig.run(60)
    return AsyncPatrol(rig)


def test_a_result_comes_with_a_copy_pushed_after_the_job_was_done(on_gpu) -> None:
    assert on_gpu.submit()
    on_gpu.copy_counters()  # this copy was pushed before it was done
    assert not on_gpu.collect()
    on_gpu.stream.done = True
    assert not on_gpu.collect()  # nor is the newest copy one pushed since
    on_gpu.copy_counters()
    assert on_gpu.checker.busy
    assert on_gpu.collect()
    assert not on_gpu.checker.busy
    assert not on_gpu.canary.health.stalled


def test_a_job_chosen_while_idle_is_not_submitted_during_forwards(make_rig, monkeypatch) -> None:
    """A job for an idle engine may be ten times as long, which would slow down a prefill."""
    monkeypatch.setattr(patrol_module, "_CPU_CHUNK", 4)
    rig = make_rig(patrol_budget="50%", idle_sweep=False)
    rig.run(60)
    now = [time.monotonic()]
    monkeypatch.setattr(patrol_module.time, "monotonic", lambda: now[0])
    on_gpu = AsyncPatrol(rig)
    patrol, size = on_gpu.patrol, on_gpu.patrol._bytes_of
    patrol._timed, patrol._busy_share = False, 0.1
    patrol._rate = rate = 2.0 * sum(size(on_gpu.patrol._next_job(1)) for _ in on_gpu.patrol._chunks)
    patrol._cursor = 0
    patrol.skip_time()
    patrol.advance(idle=True)
    now[0] += 0.25
    patrol.advance(idle=True)
    chosen = patrol._chosen
    assert size(chosen) > 0.9 * rate * 0.25
    patrol.advance(idle=False)
    assert not on_gpu.checker.busy
    assert patrol._chosen.first_chunk == chosen.first_chunk  # nothing is passed over
    assert size(patrol._chosen) < 0.2 * rate * 0.25
    patrol.advance(idle=False)
    assert on_gpu.checker.busy


def test_a_long_forward_earns_the_busy_rate(make_rig, monkeypatch) -> None:
    rig = make_rig(patrol_budget="50%", idle_sweep=False)
    now = [time.monotonic()]
    monkeypatch.setattr(patrol_module.time, "monotonic", lambda: now[0])
    patrol = AsyncPatrol(rig).patrol
    patrol._timed, patrol._busy_share, patrol._rate = False, 0.1, 1e6
    monkeypatch.setattr(patrol_module, "_JOB_SECONDS", 1e9)  # earns, and chooses nothing
    patrol.skip_time()
    for seconds, idle, earned in ((0.0, False, 0.0), (0.2, True, 2e4), (0.1, True, 1.2e5), (0.1, False, 1e5)):
        now[0] += seconds
        patrol.advance(idle=idle)
        assert patrol._credit == pytest.approx(earned)


def test_whole_cycles_find_what_is_corrupt(on_gpu) -> None:
    group = on_gpu.canary.state.groups[0]
    states = group.buffers.records[:, layout.IDENTITY] >> 32 & layout.STATE_MASK
    complete = (states == layout.RecordState.COMPLETE).nonzero()
    locate_byte(group.view.sources[0], int(complete[0]), 3).flip(1)
    cycles = on_gpu.patrol.cycles
    while on_gpu.patrol.cycles < cycles + 2:
        on_gpu.submit()
        on_gpu.stream.done = True
        on_gpu.collect()
        on_gpu.copy_counters()
    on_gpu.copy_counters()
    # At least once in each cycle; jobs in flight with the one that counted it may be repeated as well.
    assert 2 <= on_gpu.canary.counter_reader.violations <= 3
    lane = layout.lane(layout.Phase.PATROL, layout.Reason.KV_DATA)
    assert on_gpu.canary.counter_reader.counters[lane] == on_gpu.canary.counter_reader.violations


def test_only_a_few_jobs_are_in_flight(on_gpu) -> None:
    sent = 0
    while on_gpu.submit():
        sent += 1
        on_gpu.copy_counters()
    assert sent == 4
    assert on_gpu.checker.full
    on_gpu.stream.done = True
    assert not on_gpu.collect()
    on_gpu.copy_counters()
    assert on_gpu.collect()
    assert not on_gpu.checker.busy


def test_violations_counted_by_a_later_job_are_not_lost(on_gpu) -> None:
    """The copy with the first job's counters may hold the second's violations too: both are repeated."""
    group = on_gpu.canary.state.groups[0]
    first, second = (
        ScanJob(group=group, slots=range(start, start + 4), first_chunk=0, last_chunk=0, step=0)
        for start in (0, 4)
    )
    suspicions = on_gpu.canary.state.side_counters[layout.lane(layout.Phase.PATROL, layout.Reason.KV_DATA) :]
    on_gpu.checker.submit(first)
    on_gpu.stream.done = True
    assert results(on_gpu.checker) == []
    on_gpu.checker.submit(second)
    on_gpu.stream.done = False
    suspicions[0] += 1  # by the second, which is still in flight
    on_gpu.copy_counters()
    assert [(result.job, result.suspicious) for result in results(on_gpu.checker)] == [(first, True)]
    on_gpu.stream.done = True
    assert results(on_gpu.checker) == []
    on_gpu.copy_counters()
    assert [(result.job, result.suspicious) for result in results(on_gpu.checker)] == [(second, True)]
    on_gpu.checker.submit(first)
    assert [(result.ran, result.suspicious) for result in on_gpu.checker.wait()] == [(True, False)]


def test_a_lost_run_is_reported_once(on_gpu, monkeypatch) -> None:
    group = on_gpu.canary.state.groups[0]
    job = ScanJob(group=group, slots=range(4), first_chunk=0, last_chunk=0, step=0)
    with monkeypatch.context() as patch:
        patch.setattr(on_gpu.checker, "_compare", [lambda _: None])
        on_gpu.checker.submit(job)
    on_gpu.checker.submit(job)
    on_gpu.checker.submit(job)
    on_gpu.stream.done = True
    assert results(on_gpu.checker) == []
    on_gpu.copy_counters()
    # It is unknown which of the three was lost, but known that one was.
    assert sorted(result.ran for result in results(on_gpu.checker)) == [False, True, True]
    on_gpu.checker.submit(job)
    assert [result.ran for result in on_gpu.checker.wait()] == [True]


def test_a_whole_cycle_waits_for_jobs_in_flight(on_gpu) -> None:
    assert on_gpu.submit()
    assert on_gpu.checker.busy
    on_gpu.patrol.whole_cycle()
    assert not on_gpu.checker.busy
    assert on_gpu.patrol._checked == 0


def test_the_checker_writes_only_memory_of_its_own(make_rig) -> None:
    """Two streams write partial sums, log and clock at once."""
    rig = make_rig(model="int8", patrol_budget="50%")
    for group, (buffers, plan) in zip(
        rig.canary.state.groups, rig.canary.patrol._checker._side_buffers, strict=True
    ):
        assert group.plan.scratch is not None
        pairs = [(plan.scratch, group.plan.scratch), (buffers.counters, group.buffers.counters)]
        pairs += [(buffers.violations, group.buffers.violations), (buffers.clock, group.buffers.clock)]
        assert all(mine.data_ptr() != theirs.data_ptr() for mine, theirs in pairs)


def test_a_pass_is_as_old_as_its_own_job(on_gpu) -> None:
    """A pool that is passed within a few steps has several jobs in flight for the same slots."""
    canary, patrol = on_gpu.canary, on_gpu.patrol
    began, name = canary.step, canary.state.groups[0].name
    on_gpu.copy_counters()
    canary.state.advance(began + 1)  # its forward is running
    assert on_gpu.submit()
    on_gpu.stream.done = True
    on_gpu.checker.poll()
    canary.state.advance(began + 5)
    assert on_gpu.submit()  # the same slots again
    on_gpu.copy_counters()
    assert on_gpu.collect()
    assert len(on_gpu.checker._in_flight) == 1
    assert patrol.intact_at(name, 0) == began


def test_a_pass_is_of_forwards_that_were_over(on_gpu) -> None:
    """The host may be any number of forwards ahead of what the patrol's stream runs next to."""
    canary = on_gpu.canary
    began, name = canary.step, canary.state.groups[0].name
    on_gpu.copy_counters()
    canary.counter_reader.drain(began, 1.0)
    canary.state.advance(began + 4)
    assert on_gpu.submit()
    on_gpu.stream.done = True
    on_gpu.collect()
    on_gpu.copy_counters()
    assert on_gpu.collect()
    assert on_gpu.patrol.intact_at(name, 0) == began
