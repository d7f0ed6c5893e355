"""On a GPU an engine step runs one task; every task gets its step."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import cycle
from types import SimpleNamespace

import pytest

from canary_obs.records import Pause, Snapshot, StartDrill, Violations
from canary_obs.runtime import step_scheduler
from canary_obs.runtime.device.byte_address import locate_byte
from canary_obs.runtime.report import snapshot_builder
from canary_obs.runtime.step_scheduler import CURRENT_STREAM
from canary_obs.transport.links import LocalLink
from canary_obs.vocabulary import Mode, Reason, State, Trigger
from tests.links import OneThreadLink


@pytest.fixture
def link() -> LocalLink:
    return OneThreadLink()


def every(link: LocalLink) -> list[object]:
    messages: list[object] = []
    while (message := link.next_message(0.0)) is not None:
        messages.append(message)
    return messages


def sent(link: LocalLink) -> list[Snapshot]:
    return [message for message in every(link) if isinstance(message, Snapshot)]


@pytest.fixture
def rig(make_rig, link):
    """A snapshot is always due, and so is a scan job of the patrol."""
    made = make_rig(link=link, patrol_budget="50%", idle_sweep=False, snapshot_seconds=1e-9)
    made.run(5)
    sent(link)
    return made


# The calls that make a snapshot, in order.
PARTS = "status", "make_health_inputs", "verdict", "counter_rows", "named_counters", "make_snapshot", "send"


def note_parts(rig, monkeypatch) -> list[str]:
    done: list[str] = []

    def noting(owner, name: str) -> None:
        part = getattr(owner, name)

        def noted(*given, **named):
            found = part(*given, **named)
            if found is not False:
                done.append(name)
            return found

        monkeypatch.setattr(owner, name, noted)

    canary = rig.canary
    noting(canary.patrol, "advance")
    for name in ("make_health_inputs", "counter_rows", "named_counters", "make_snapshot"):
        noting(snapshot_builder, name)
    noting(canary.health, "verdict")
    noting(canary.reporter, "send")
    noting(canary.reporter, "receive")
    noting(canary.counter_reader, "status")
    noting(canary.counter_reader, "push")
    noting(canary.counter_reader._counters, "newest")
    noting(canary.counter_reader, "process")
    return done


class CountingStream:
    """A stream for a step's launches; counts how often it is entered."""

    def __init__(self) -> None:
        self.entered = 0
        self.inside = False

    def __enter__(self) -> None:
        self.entered += 1
        self.inside = True

    def __exit__(self, *raised: object) -> None:
        self.inside = False


@pytest.fixture
def stream() -> CountingStream:
    return CountingStream()


@pytest.fixture
def done(rig, monkeypatch) -> list[str]:
    """Parts that found something to do; the engine's steps as short as they come, on a GPU."""
    done = note_parts(rig, monkeypatch)
    rig.canary._scheduler._rotating = True
    rig.canary.idle()
    done.clear()
    return done


def steps(
    rig, done: list[str], count: int, seconds: float = 0.0, stream=CURRENT_STREAM
) -> list[tuple[str, ...]]:
    """What each step did, its forward included; the patrol can afford every scan job."""
    found = []
    for _ in range(count):
        rig.canary.patrol._credit, rig.canary.patrol._timed = 1.0, False
        rig.canary._scheduler.after_forward()
        rig.canary.run.last_step_end = time.monotonic() - seconds if seconds else None
        rig.canary._scheduler.step(stream)
        found.append(tuple(done))
        done.clear()
    return found


def test_a_step_runs_one_task_and_tasks_rotate(rig, done, stream) -> None:
    found = steps(rig, done, 12 * len(PARTS), stream=stream)
    wanted = (
        "advance",
        "send",
        "advance",
        "newest",
        "process",
        "send",
        "advance",
        "send",
        "advance",
        "newest",
        "process",
    )
    snapshot_part = iter(3 * PARTS)
    for round_start in range(0, len(found), 12):
        for number, (calls, task) in enumerate(zip(found[round_start:], (*wanted, "receive"), strict=False)):
            # A requested copy is started after the next forward.
            pushed = ("push",) if number in (1, 7) else ()
            assert calls == (*pushed, next(snapshot_part) if task == "send" else task)
    assert stream.entered == 0  # launches only after forwards, and on the patrol's own stream


def test_a_requested_copy_is_started_without_a_forward_too(rig, done, stream) -> None:
    for _ in range(11):
        rig.canary.run.last_step_end = None
        rig.canary._scheduler.step(stream)
    assert "push" not in done
    done.clear()
    rig.canary.run.last_step_end = None
    rig.canary._scheduler.step(stream)
    assert done == ["receive", "push"]
    assert stream.entered == 1


def test_short_steps_run_a_task_every_four_milliseconds(rig, done, monkeypatch) -> None:
    run, scheduler = rig.canary.run, rig.canary._scheduler
    scheduler._cycle = cycle([step_scheduler._Task("any", "pump", lambda: done.append("task"))])
    now = 100.0
    monkeypatch.setattr(step_scheduler.time, "monotonic", lambda: now)
    scheduler.step(CURRENT_STREAM)  # the first one since the engine was idle
    ran = [len(done)]
    for milliseconds in (1.5, 1.5, 1.5, 3.0, 0.5, 1.0, 9.0, 1.0, 3.5):
        now += milliseconds / 1e3
        scheduler.step(CURRENT_STREAM)
        ran.append(len(done))
    assert ran == [1, 1, 1, 2, 2, 2, 3, 4, 4, 5]
    run.last_step_end = None
    scheduler.step(CURRENT_STREAM)
    assert len(done) == 6


def test_what_was_not_shown_is_looked_for_before_anything_is_compared(rig, done, monkeypatch) -> None:
    """And not in steps without tasks, which compare nothing."""
    scheduler, called = rig.canary._scheduler, []
    monkeypatch.setattr(rig.canary.forwards, "settle", lambda: called.append("forwards"))
    hits = SimpleNamespace(settle=lambda: called.append("hits"))
    scheduler._workers = replace(scheduler._workers, hits=hits)
    scheduler._cycle = cycle([step_scheduler._Task("any", "pump", lambda: called.append("task"))])
    now = 100.0
    monkeypatch.setattr(step_scheduler.time, "monotonic", lambda: now)
    scheduler.step(CURRENT_STREAM)
    assert called == ["forwards", "hits", "task"]
    now += 0.001
    scheduler.step(CURRENT_STREAM)
    assert len(called) == 3
    scheduler._urgent = True
    monkeypatch.setattr(scheduler, "_run_urgent", lambda: called.append("urgent"))
    scheduler.step(CURRENT_STREAM)
    assert called[3:] == ["forwards", "hits", "urgent"]
    scheduler._rotating = False
    monkeypatch.setattr(scheduler, "_run_all", lambda _: called.append("all"))
    scheduler.step(CURRENT_STREAM)
    assert called[6:] == ["forwards", "hits", "all"]


def test_a_pause_of_the_engine_is_no_long_step(rig, done) -> None:
    found = steps(rig, done, 2, seconds=3600.0)
    assert [(parts.count("newest"), parts.count("receive")) for parts in found] == [(2, 1), (2, 1)]


def test_a_long_step_excuses_copies_that_waited_for_it(rig, done) -> None:
    steps(rig, done, 1, seconds=0.5)
    assert rig.canary.run.excused_seconds(time.monotonic()) == 0.0
    steps(rig, done, 1, seconds=20.0)
    assert rig.canary.run.excused_seconds(time.monotonic()) == pytest.approx(20.0, abs=1.0)


def flipped(rig):
    """A byte that a check of all has found."""
    canary = rig.canary
    slot = int(rig.engine.scheduler.live_slots()[0])
    address = locate_byte(canary.state.groups[0].view.sources[0], slot, 3)
    address.flip(1)
    canary.patrol.confirm([canary.patrol._next_job(len(canary.patrol._chunks))])
    canary.patrol._cursor = 0
    return address


def test_rows_of_a_violation_are_read_in_every_step(rig, link, done, stream, monkeypatch) -> None:
    canary, polls = rig.canary, []
    poll = canary.counter_reader._rows.poll

    def late() -> list:
        polls.append(canary.step)
        assert stream.inside  # a copy on another stream would not wait for what was launched here
        return [] if len(polls) < 4 else poll()

    monkeypatch.setattr(canary.counter_reader._rows, "poll", late)
    address = flipped(rig)
    found = []
    while not canary.counter_reader.violations:
        found += steps(rig, done, 1, stream=stream)
    assert len(found) <= 9  # a copy is requested, started, fetched, processed
    while canary.counter_reader.alarmed:
        (parts,) = steps(rig, done, 1, stream=stream)
        assert {"push", "newest", "process"} <= set(parts)
    assert 4 <= len(polls) <= 5
    messages = [message for message in every(link) if isinstance(message, Violations)]
    assert {row.reason for message in messages for row in message.rows} == {Reason.KV_DATA}
    address.flip(1)


def test_suspicious_jobs_are_confirmed_on_the_given_stream(rig, done, stream, monkeypatch) -> None:
    canary, job = rig.canary, rig.canary.patrol._next_job(1)
    compared = []
    monkeypatch.setattr(canary.patrol, "advance", lambda *_, **__: [job])
    monkeypatch.setattr(canary.patrol, "confirm", lambda jobs: compared.append((*jobs, stream.inside)))
    steps(rig, done, 1, stream=stream)
    assert compared == [(job, True)]


@pytest.mark.parametrize("name", ["sweep", "drill", "evidence"])
def test_urgent_work_runs_in_every_step_until_it_ends(rig, done, stream, monkeypatch, name) -> None:
    canary, calls = rig.canary, []
    owner, busy, part = {
        "sweep": (canary.sweeper, "running", "advance"),
        "drill": (canary.drill, "busy", "advance"),
        "evidence": (canary.evidence, "busy", "advance"),
    }[name]
    monkeypatch.setattr(type(owner), busy, property(lambda _: len(calls) < 3))
    monkeypatch.setattr(owner, part, lambda *_: calls.append(stream.inside) or [])
    steps(rig, done, 12, stream=stream)  # the last of these updates whether there is urgent work
    assert calls == []
    steps(rig, done, 12, stream=stream)
    assert calls == [True, True, True]
    assert stream.entered == 3


def test_an_interval_sweep_begins_at_its_step_and_is_urgent(make_rig, stream) -> None:
    rig = make_rig(sweep_interval=7, patrol_budget="0", idle_sweep=False)
    rig.run(20)
    canary = rig.canary
    canary._scheduler._rotating = True
    while canary.sweeper.running:
        canary.idle()
    before = canary.sweeper.passes[Trigger.INTERVAL]
    canary.run.step = canary.step // 7 * 7 + 8  # an engine step of several forwards passed over the multiple
    canary._scheduler.step(stream)
    assert canary.sweeper.running
    assert stream.entered == 1
    assert canary.sweeper.progress.step == canary.step
    while canary.sweeper.running:
        canary._scheduler.step(stream)
    assert canary.sweeper.passes[Trigger.INTERVAL] == before + 1
    canary._scheduler.step(stream)
    assert not canary.sweeper.running
    canary.run.step += 6  # the next multiple, though not seven steps since the last sweep
    canary._scheduler.step(stream)
    assert canary.sweeper.running


def test_an_injector_restores_bytes_on_the_given_stream(rig, done, stream, monkeypatch) -> None:
    class FakeInjector:
        def match(self, *_, **__) -> None:
            matched.append(stream.inside)

    matched: list[bool] = []
    monkeypatch.setattr(rig.canary.delivery, "_injector", FakeInjector())
    steps(rig, done, 12, stream=stream)
    assert matched == [True, True]  # with each processed copy


def test_commands_are_executed_on_the_given_stream(rig, link, done, stream, monkeypatch) -> None:
    started = []
    monkeypatch.setattr(rig.canary.drill, "start", lambda *_: started.append(stream.inside))
    link.send_command(StartDrill(id="d"))
    steps(rig, done, 12, stream=stream)
    assert started == [True]


@pytest.mark.parametrize(
    ("broken", "part"),
    [
        ("health.compare_runs", "pump"), ("counter_reader._counters.push", "pump"),
        ("counter_reader._counters.newest", "pump"),
        ("patrol.advance", "patrol"), ("health.verdict", "snapshot"), ("reporter.receive", "mailbox"),
        ("sweeper.begin_automatic", "sweep"), ("swa.report", "swa_divergence"),
    ],
)  # fmt: skip
def test_a_failing_task_is_counted_and_no_task_is_lost(rig, done, monkeypatch, broken, part) -> None:
    def fail(*_, **__) -> None:
        raise ZeroDivisionError(broken)

    owner, *names = rig.canary, *broken.split(".")
    for name in names[:-1]:
        owner = getattr(owner, name)
    with monkeypatch.context() as patch:
        patch.setattr(owner, names[-1], fail)
        patch.setattr(rig.canary._scheduler, "_interval", 1000)
        patch.setattr(rig.canary._scheduler, "_sweep_at", rig.canary.step)
        patch.setattr(rig.canary.swa, "due_step", rig.canary.step)
        steps(rig, done, 40)
    assert set(rig.canary.health.faults) == {part}
    found = {name for parts in steps(rig, done, 40) for name in parts}
    assert found >= {"push", "newest", "process", "advance", "receive", *PARTS}


def test_rows_that_cannot_be_read_are_read_later(rig, link, done, monkeypatch) -> None:
    flipped(rig).flip(1)  # one violation, and no other to come
    with monkeypatch.context() as patch:
        patch.setattr(rig.canary.counter_reader.log, "has_unread", lambda _: 1 / 0)
        steps(rig, done, 40)
    assert set(rig.canary.health.faults) == {"pump"}
    steps(rig, done, 4)
    messages = [message for message in every(link) if isinstance(message, Violations)]
    assert [row.reason for message in messages for row in message.rows] == [Reason.KV_DATA]


def test_the_patrol_runs_where_no_snapshot_is_due(rig, done, monkeypatch) -> None:
    monkeypatch.setattr(rig.canary.reporter, "snapshot_due", lambda _: False)
    names = [name for parts in steps(rig, done, 12) for name in parts]
    assert [names.count(name) for name in ("push", "newest", "process", "advance", "receive")] == [
        2,
        2,
        2,
        7,
        1,
    ]


def test_a_long_step_runs_more_tasks(rig, done) -> None:
    assert [len(set(parts) - {"push"}) > 2 for parts in steps(rig, done, 3, seconds=0.1)] == [True] * 3
    rig.canary._scheduler._cycle = cycle([step_scheduler._Task("any", "pump", lambda: done.append("task"))])
    assert [parts.count("task") for parts in steps(rig, done, 3, seconds=0.1)] == [5, 5, 5]


@pytest.mark.parametrize("on_gpu", [False, True])
def test_an_engine_with_long_steps_sends_a_snapshot_in_each(rig, link, monkeypatch, on_gpu) -> None:
    """One part per step would make its snapshots so old that the service calls the rank blind."""
    done = note_parts(rig, monkeypatch)
    rig.canary._scheduler._rotating = on_gpu
    sent(link)
    for seconds in (0.3, 1.0, 5.0):
        steps(rig, done, 1, seconds=seconds)
        assert sent(link)


def test_in_mode_raise_counters_move_in_every_step(make_rig, monkeypatch) -> None:
    rig = make_rig(mode=Mode.RAISE, patrol_budget="50%", idle_sweep=False, snapshot_seconds=1e-9)
    done = note_parts(rig, monkeypatch)
    monkeypatch.setattr(rig.canary._scheduler, "_rotating", True)
    found = steps(rig, done, 12) + steps(rig, done, 4, seconds=0.04)
    assert all({"push", "newest", "process"} < set(parts) for parts in found)


def test_on_a_cpu_every_step_runs_all_tasks(rig, monkeypatch) -> None:
    done = note_parts(rig, monkeypatch)
    for parts in steps(rig, done, 10):
        assert {"advance", "receive", "push", "newest", "process"} <= set(parts)
        assert len(parts) == 6


def test_an_idle_engine_runs_all_tasks(rig, link, done) -> None:
    link.send_command(Pause())
    rig.canary.idle()
    assert {"advance", "receive", "push", "newest", "process", *PARTS} <= set(done)
    assert rig.canary.run.paused


def test_verdict_and_counters_of_a_snapshot_are_of_one_copy(rig, link) -> None:
    """The engine goes on between the parts of a snapshot, and a fault may happen meanwhile."""
    canary = rig.canary
    advance = canary._scheduler._workers.snapshots.advance
    canary._scheduler._workers.snapshots.finish()
    sent(link)
    assert advance()
    assert advance()
    assert advance()  # the verdict: ok
    slot = int(rig.engine.scheduler.live_slots()[0])
    address = locate_byte(canary.state.groups[0].view.sources[0], slot, 3)
    address.flip(1)
    canary.patrol.whole_cycle()
    canary.counter_reader.drain(canary.step, 1.0)
    assert canary.counter_reader.violations > 0
    for _ in PARTS[3:]:
        assert advance()
    before, *_ = sent(link)
    assert before.state is State.OK
    assert sum(before.groups["full"].violations[phase][reason] for phase in before.groups["full"].violations
               for reason in before.groups["full"].violations[phase]) == 0  # fmt: skip
    for _ in PARTS:
        assert advance()
    after, *_ = sent(link)
    assert after.state is State.VIOLATED
    assert after.sequence == before.sequence + 1
    address.flip(1)


@pytest.mark.parametrize("part", ["make_health_inputs", "counter_rows", "named_counters", "make_snapshot"])
def test_a_snapshot_that_fails_is_a_fault_and_the_next_one_is_sent(rig, link, monkeypatch, part) -> None:
    def fail(*_) -> None:
        raise ZeroDivisionError(part)

    scheduler = rig.canary._scheduler

    def advance() -> bool:
        return scheduler._faults.guard("snapshot", scheduler._workers.snapshots.advance) or True

    rig.canary._scheduler._workers.snapshots.finish()
    sent(link)
    with monkeypatch.context() as patch:
        patch.setattr(snapshot_builder, part, fail)
        while not rig.canary.health.faults["snapshot"]:
            assert advance()
    while not (snapshots := sent(link)):
        assert advance()
    assert snapshots[0].observer_faults == {"snapshot": 1}
    assert snapshots[0].state is State.BLIND


def test_in_mode_raise_a_fault_of_a_task_is_raised(make_rig, monkeypatch) -> None:
    rig = make_rig(mode=Mode.RAISE, patrol_budget="0", snapshot_seconds=1e-9)
    rig.canary._scheduler._workers.snapshots.finish()
    monkeypatch.setattr(snapshot_builder, "make_health_inputs", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        rig.run(3)
