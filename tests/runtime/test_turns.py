"""An engine step has time for one part of what can wait; nobody waits for ever."""

from __future__ import annotations

import pytest

from canary_obs.pipeline.mailbox import LocalLink
from canary_obs.records import Mode, Pause, Snapshot, State
from canary_obs.runtime import telling, turns
from canary_obs.runtime.perturb.bytes import locate_byte


@pytest.fixture
def link() -> LocalLink:
    return LocalLink()


def sent(link: LocalLink) -> list[Snapshot]:
    messages = []
    while (message := link.take(0.0)) is not None:
        messages.append(message)
    return [message for message in messages if isinstance(message, Snapshot)]


@pytest.fixture
def rig(make_rig, link):
    """A snapshot is always due, and so is an errand."""
    made = make_rig(link=link, patrol_budget="50%", idle_sweep=False, snapshot_seconds=1e-9)
    made.run(5)
    sent(link)
    return made


# Of a snapshot, in this order.
PARTS = "status", "vitals_with", "verdict", "counter_rows", "named_counters", "snapshot_of", "tell"


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
    for name in ("vitals_with", "counter_rows", "named_counters", "snapshot_of"):
        noting(telling, name)
    noting(canary.health, "verdict")
    noting(canary.reporter, "tell")
    noting(turns, "obey")
    noting(canary.pump, "status")
    noting(canary.pump, "push")
    noting(canary.pump, "fetch")
    noting(canary.pump, "take")
    return done


@pytest.fixture
def done(rig, monkeypatch) -> list[str]:
    """Parts that found something to do; the engine's steps as short as they come, on a GPU."""
    done = note_parts(rig, monkeypatch)
    rig.canary._turns._rotating = True
    rig.canary._turns._telling.finish()
    done.clear()
    return done


def steps(rig, done: list[str], count: int, seconds: float = 0.0) -> list[tuple[str, ...]]:
    """What each step did; every errand is paid for."""
    found = []
    for _ in range(count):
        rig.canary.patrol._credit, rig.canary.patrol._timed = 1.0, False
        rig.canary._turns.step(seconds)
        found.append(tuple(done))
        done.clear()
    return found


def test_a_step_takes_one_part_and_each_has_its_turn(rig, done) -> None:
    found = steps(rig, done, 12 * len(PARTS))
    assert all(len(parts) == 1 for parts in found)
    in_order = [parts[0] for parts in found]
    assert in_order[0::6] == 2 * len(PARTS) * ["push"]
    assert in_order[2::6] == 2 * len(PARTS) * ["fetch"]
    assert in_order[4::6] == 2 * len(PARTS) * ["take"]
    assert in_order[3::12] == in_order[7::12] == len(PARTS) * ["advance"]
    assert in_order[11::12] == len(PARTS) * ["obey"]
    assert [name for name in in_order if name in PARTS] == 3 * [*PARTS]


def test_a_pause_of_the_engine_is_no_long_step(rig, done) -> None:
    found = steps(rig, done, 2, seconds=3600.0)
    assert [(parts.count("push"), parts.count("obey")) for parts in found] == [(2, 1), (2, 1)]


def test_rows_of_a_violation_do_not_wait_for_their_turn(rig, done, monkeypatch) -> None:
    canary, polls = rig.canary, []
    poll = canary.pump._rows.poll

    def late() -> list:
        polls.append(canary.step)
        return [] if len(polls) < 4 else poll()

    monkeypatch.setattr(canary.pump._rows, "poll", late)
    slot = int(rig.engine.scheduler.live_slots()[0])
    address = locate_byte(canary.state.groups[0].view.sources[0], slot, 3)
    address.flip(1)
    canary.patrol._confirm(canary.patrol._next(len(canary.patrol._chunks)))
    canary.patrol._cursor = 0
    found = []
    while not canary.pump.violations:
        found += steps(rig, done, 1)
    assert len(found) <= 6  # a copy is started, fetched, looked at
    assert all(len(parts) == 1 for parts in found)
    while canary.pump.alarmed:
        (parts,) = steps(rig, done, 1)
        assert parts[:3] == ("push", "fetch", "take")
    assert len(polls) == 4
    assert [len(parts) for parts in steps(rig, done, 3)] == [1, 1, 1]
    address.flip(1)


@pytest.mark.parametrize(
    ("broken", "part"),
    [
        ("pump.log.moved", "pump"), ("pump._counters.push", "pump"), ("pump._counters.newest", "pump"),
        ("patrol.advance", "patrol"), ("health.verdict", "snapshot"), ("reporter.receive", "mailbox"),
    ],
)  # fmt: skip
def test_what_fails_in_its_turn_is_counted_and_no_turn_is_lost(rig, done, monkeypatch, broken, part) -> None:
    def fail(*_, **__) -> None:
        raise ZeroDivisionError(broken)

    owner, *names = rig.canary, *broken.split(".")
    for name in names[:-1]:
        owner = getattr(owner, name)
    with monkeypatch.context() as patch:
        patch.setattr(owner, names[-1], fail)
        steps(rig, done, 40)
    assert set(rig.canary.health.faults) == {part}
    found = {name for parts in steps(rig, done, 40) for name in parts}
    assert found >= {"push", "fetch", "take", "advance", "obey", *PARTS}


def test_where_no_snapshot_is_due_the_patrol_has_its_turns(rig, done, monkeypatch) -> None:
    monkeypatch.setattr(rig.canary.reporter, "due", lambda _: False)
    names = [parts[0] for parts in steps(rig, done, 12)]
    assert [names.count(name) for name in ("push", "fetch", "take", "advance", "obey")] == [2, 2, 2, 5, 1]


def test_a_long_step_has_time_for_more(rig, done) -> None:
    assert [len(parts) for parts in steps(rig, done, 3, seconds=0.1)] == [5, 5, 5]


def test_in_mode_raise_counters_move_in_every_step(make_rig, monkeypatch) -> None:
    rig = make_rig(mode=Mode.RAISE, patrol_budget="50%", idle_sweep=False, snapshot_seconds=1e-9)
    done = note_parts(rig, monkeypatch)
    monkeypatch.setattr(rig.canary._turns, "_rotating", True)
    found = steps(rig, done, 12) + steps(rig, done, 4, seconds=0.04)
    assert all({"push", "fetch", "take"} < set(parts) for parts in found)


def test_on_a_cpu_every_step_takes_all(rig, monkeypatch) -> None:
    done = note_parts(rig, monkeypatch)
    for parts in steps(rig, done, 10):
        assert {"advance", "obey", "push", "fetch", "take"} <= set(parts)
        assert len(parts) == 6


def test_at_rest_nothing_waits(rig, link, done) -> None:
    link.deliver(Pause())
    rig.canary.idle()
    assert {"advance", "obey", "push", "fetch", "take", *PARTS} <= set(done)
    assert rig.canary.paused


def test_verdict_and_counters_of_a_snapshot_are_of_one_moment(rig, link) -> None:
    """Between the parts of a snapshot the engine goes on, and may be struck."""
    canary = rig.canary
    advance = canary._turns._telling.advance
    canary._turns._telling.finish()
    sent(link)
    assert advance()
    assert advance()
    assert advance()  # the verdict: ok
    slot = int(rig.engine.scheduler.live_slots()[0])
    address = locate_byte(canary.state.groups[0].view.sources[0], slot, 3)
    address.flip(1)
    canary.patrol.whole_cycle()
    canary.pump.drain(canary.step, 1.0)
    assert canary.pump.violations > 0
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


@pytest.mark.parametrize("part", ["vitals_with", "counter_rows", "named_counters", "snapshot_of"])
def test_a_snapshot_that_cannot_be_made_is_a_fault_and_the_next_one_is_sent(
    rig, link, monkeypatch, part
) -> None:
    def fail(*_) -> None:
        raise ZeroDivisionError(part)

    advance = rig.canary._turns._tell
    rig.canary._turns._telling.finish()
    sent(link)
    with monkeypatch.context() as patch:
        patch.setattr(telling, part, fail)
        while not rig.canary.health.faults["snapshot"]:
            assert advance()
    while not (told := sent(link)):
        assert advance()
    assert told[0].observer_faults == {"snapshot": 1}
    assert told[0].state is State.BLIND


def test_in_mode_raise_a_fault_of_a_turn_is_passed_on(make_rig, monkeypatch) -> None:
    rig = make_rig(mode=Mode.RAISE, patrol_budget="0", snapshot_seconds=1e-9)
    rig.canary._turns._telling.finish()
    monkeypatch.setattr(telling, "vitals_with", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        rig.run(3)
