"""An engine step has time for one part of what can wait; nobody waits for ever."""

from __future__ import annotations

import time
from itertools import cycle

import pytest

from canary_obs.records import Pause, Snapshot, StartDrill, Violations
from canary_obs.runtime import step_scheduler as turns
from canary_obs.runtime.device.byte_address import locate_byte
from canary_obs.runtime.report import snapshot_builder as telling
from canary_obs.runtime.step_scheduler import HERE
from canary_obs.transport.links import LocalLink
from canary_obs.vocabulary import Mode, Reason, State, Trigger


@pytest.fixture
def link() -> LocalLink:
    return LocalLink()


def every(link: LocalLink) -> list[object]:
    messages: list[object] = []
    while (message := link.take(0.0)) is not None:
        messages.append(message)
    return messages


def sent(link: LocalLink) -> list[Snapshot]:
    return [message for message in every(link) if isinstance(message, Snapshot)]


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
    noting(canary.reporter, "receive")
    noting(canary.counter_reader, "status")
    noting(canary.counter_reader, "push")
    noting(canary.counter_reader._counters, "newest")
    noting(canary.counter_reader, "look")
    return done


class Beside:
    """Where a step's launches go; counts how often the way there is taken."""

    def __init__(self) -> None:
        self.entered = 0
        self.inside = False

    def __enter__(self) -> None:
        self.entered += 1
        self.inside = True

    def __exit__(self, *raised: object) -> None:
        self.inside = False


@pytest.fixture
def beside() -> Beside:
    return Beside()


@pytest.fixture
def done(rig, monkeypatch) -> list[str]:
    """Parts that found something to do; the engine's steps as short as they come, on a GPU."""
    done = note_parts(rig, monkeypatch)
    rig.canary._turns._rotating = True
    rig.canary.idle()
    done.clear()
    return done


def steps(rig, done: list[str], count: int, seconds: float = 0.0, beside=HERE) -> list[tuple[str, ...]]:
    """What each step did, its forward included; every errand is paid for."""
    found = []
    for _ in range(count):
        rig.canary.patrol._credit, rig.canary.patrol._timed = 1.0, False
        rig.canary._turns.forward_done()
        rig.canary.last_step_end = time.monotonic() - seconds if seconds else None
        rig.canary._turns.step(beside)
        found.append(tuple(done))
        done.clear()
    return found


def test_a_step_takes_one_part_and_each_has_its_turn(rig, done, beside) -> None:
    found = steps(rig, done, 12 * len(PARTS), beside=beside)
    wanted = (
        "advance",
        "tell",
        "advance",
        "newest",
        "look",
        "tell",
        "advance",
        "tell",
        "advance",
        "newest",
        "look",
    )
    told = iter(3 * PARTS)
    for round_start in range(0, len(found), 12):
        for number, (parts, turn) in enumerate(zip(found[round_start:], (*wanted, "receive"), strict=False)):
            # Behind the forward after a copy was wanted, it is started.
            pushed = ("push",) if number in (1, 7) else ()
            assert parts == (*pushed, next(told) if turn == "tell" else turn)
    assert beside.entered == 0  # nothing was launched but behind forwards, and on the patrol's stream


def test_a_copy_that_waits_for_a_forward_in_vain_is_started_all_the_same(rig, done, beside) -> None:
    for _ in range(11):
        rig.canary._turns.step(beside)
    assert "push" not in done
    done.clear()
    rig.canary._turns.step(beside)
    assert done == ["receive", "push"]
    assert beside.entered == 1


def test_a_pause_of_the_engine_is_no_long_step(rig, done) -> None:
    found = steps(rig, done, 2, seconds=3600.0)
    assert [(parts.count("newest"), parts.count("receive")) for parts in found] == [(2, 1), (2, 1)]


def flipped(rig):
    """A byte that a check of all has found."""
    canary = rig.canary
    slot = int(rig.engine.scheduler.live_slots()[0])
    address = locate_byte(canary.state.groups[0].view.sources[0], slot, 3)
    address.flip(1)
    canary.patrol.confirm([canary.patrol._next(len(canary.patrol._chunks))])
    canary.patrol._cursor = 0
    return address


def test_rows_of_a_violation_do_not_wait_for_their_turn(rig, link, done, beside, monkeypatch) -> None:
    canary, polls = rig.canary, []
    poll = canary.counter_reader._rows.poll

    def late() -> list:
        polls.append(canary.step)
        assert beside.inside  # a copy that is started elsewhere is not ordered behind what was launched there
        return [] if len(polls) < 4 else poll()

    monkeypatch.setattr(canary.counter_reader._rows, "poll", late)
    address = flipped(rig)
    found = []
    while not canary.counter_reader.violations:
        found += steps(rig, done, 1, beside=beside)
    assert len(found) <= 9  # a copy is wanted, started, fetched, looked at
    while canary.counter_reader.alarmed:
        (parts,) = steps(rig, done, 1, beside=beside)
        assert {"push", "newest", "look"} <= set(parts)
    assert 4 <= len(polls) <= 5
    told = [message for message in every(link) if isinstance(message, Violations)]
    assert {row.reason for message in told for row in message.rows} == {Reason.KV_DATA}
    address.flip(1)


def test_a_suspicion_is_confirmed_beside_the_engine(rig, done, beside, monkeypatch) -> None:
    canary, job = rig.canary, rig.canary.patrol._next(1)
    compared = []
    monkeypatch.setattr(canary.patrol, "advance", lambda *_, **__: [job])
    monkeypatch.setattr(canary.patrol, "confirm", lambda jobs: compared.append((*jobs, beside.inside)))
    steps(rig, done, 1, beside=beside)
    assert compared == [(job, True)]


@pytest.mark.parametrize("name", ["sweep", "drill", "evidence"])
def test_what_is_rare_is_attended_to_beside_the_engine_until_it_ends(
    rig, done, beside, monkeypatch, name
) -> None:
    canary, calls = rig.canary, []
    owner, busy, part = {
        "sweep": (canary.sweeper, "running", "advance"),
        "drill": (canary.drill, "busy", "advance"),
        "evidence": (canary.evidence, "busy", "advance"),
    }[name]
    monkeypatch.setattr(type(owner), busy, property(lambda _: len(calls) < 3))
    monkeypatch.setattr(owner, part, lambda *_: calls.append(beside.inside) or [])
    steps(
        rig, done, 12, beside=beside
    )  # the service's orders are asked for, and with them whether there is one
    assert calls == []
    steps(rig, done, 12, beside=beside)
    assert calls == [True, True, True]
    assert beside.entered == 3


def test_an_interval_sweep_begins_at_its_step_and_is_attended_to_at_once(make_rig, beside) -> None:
    rig = make_rig(sweep_interval=7, patrol_budget="0", idle_sweep=False)
    rig.run(20)
    canary = rig.canary
    canary._turns._rotating = True
    while canary.sweeper.running:
        canary.idle()
    before = canary.sweeper.passes[Trigger.INTERVAL]
    canary.step = canary.step // 7 * 7 + 8  # an engine step of several forwards passed over the multiple
    canary._turns.step(beside)
    assert canary.sweeper.running
    assert beside.entered == 1
    assert canary.sweeper.progress.step == canary.step
    while canary.sweeper.running:
        canary._turns.step(beside)
    assert canary.sweeper.passes[Trigger.INTERVAL] == before + 1
    canary._turns.step(beside)
    assert not canary.sweeper.running
    canary.step += 6  # the next multiple, though not seven steps since the last sweep
    canary._turns.step(beside)
    assert canary.sweeper.running


def test_an_injector_heals_beside_the_engine(rig, done, beside, monkeypatch) -> None:
    class Heals:
        def observe(self, *_, **__) -> None:
            healed.append(beside.inside)

    healed: list[bool] = []
    monkeypatch.setattr(rig.canary, "injector", Heals())
    steps(rig, done, 12, beside=beside)
    assert healed == [True, True]  # with each copy that is looked at


def test_commands_are_obeyed_beside_the_engine(rig, link, done, beside, monkeypatch) -> None:
    demanded = []
    monkeypatch.setattr(rig.canary.drill, "demand", lambda *_: demanded.append(beside.inside))
    link.deliver(StartDrill(id="d"))
    steps(rig, done, 12, beside=beside)
    assert demanded == [True]


@pytest.mark.parametrize(
    ("broken", "part"),
    [
        ("health.observe", "pump"), ("pump._counters.push", "pump"), ("pump._counters.newest", "pump"),
        ("patrol.advance", "patrol"), ("health.verdict", "snapshot"), ("reporter.receive", "mailbox"),
        ("sweeper.begin_automatic", "sweep"), ("swa.report", "swa_divergence"),
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
        patch.setattr(rig.canary._turns, "_interval", 1000)
        patch.setattr(rig.canary._turns, "_sweep_at", rig.canary.step)
        patch.setattr(rig.canary.swa, "due_step", rig.canary.step)
        steps(rig, done, 40)
    assert set(rig.canary.health.faults) == {part}
    found = {name for parts in steps(rig, done, 40) for name in parts}
    assert found >= {"push", "newest", "look", "advance", "receive", *PARTS}


def test_rows_that_cannot_be_read_are_read_later(rig, link, done, monkeypatch) -> None:
    flipped(rig).flip(1)  # one violation, and no other to come
    with monkeypatch.context() as patch:
        patch.setattr(rig.canary.counter_reader.log, "moved", lambda _: 1 / 0)
        steps(rig, done, 40)
    assert set(rig.canary.health.faults) == {"pump"}
    steps(rig, done, 4)
    told = [message for message in every(link) if isinstance(message, Violations)]
    assert [row.reason for message in told for row in message.rows] == [Reason.KV_DATA]


def test_where_no_snapshot_is_due_the_patrol_has_its_turns(rig, done, monkeypatch) -> None:
    monkeypatch.setattr(rig.canary.reporter, "due", lambda _: False)
    names = [name for parts in steps(rig, done, 12) for name in parts]
    assert [names.count(name) for name in ("push", "newest", "look", "advance", "receive")] == [2, 2, 2, 7, 1]


def test_a_long_step_has_time_for_more(rig, done) -> None:
    assert [len(set(parts) - {"push"}) > 2 for parts in steps(rig, done, 3, seconds=0.1)] == [True] * 3
    rig.canary._turns._cycle = cycle([turns._Task("any", "pump", lambda: done.append("turn"))])
    assert [parts.count("turn") for parts in steps(rig, done, 3, seconds=0.1)] == [5, 5, 5]


def test_in_mode_raise_counters_move_in_every_step(make_rig, monkeypatch) -> None:
    rig = make_rig(mode=Mode.RAISE, patrol_budget="50%", idle_sweep=False, snapshot_seconds=1e-9)
    done = note_parts(rig, monkeypatch)
    monkeypatch.setattr(rig.canary._turns, "_rotating", True)
    found = steps(rig, done, 12) + steps(rig, done, 4, seconds=0.04)
    assert all({"push", "newest", "look"} < set(parts) for parts in found)


def test_on_a_cpu_every_step_takes_all(rig, monkeypatch) -> None:
    done = note_parts(rig, monkeypatch)
    for parts in steps(rig, done, 10):
        assert {"advance", "receive", "push", "newest", "look"} <= set(parts)
        assert len(parts) == 6


def test_at_rest_nothing_waits(rig, link, done) -> None:
    link.deliver(Pause())
    rig.canary.idle()
    assert {"advance", "receive", "push", "newest", "look", *PARTS} <= set(done)
    assert rig.canary.paused


def test_verdict_and_counters_of_a_snapshot_are_of_one_moment(rig, link) -> None:
    """Between the parts of a snapshot the engine goes on, and may be struck."""
    canary = rig.canary
    advance = canary._turns._snapshots.advance
    canary._turns._snapshots.finish()
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


@pytest.mark.parametrize("part", ["vitals_with", "counter_rows", "named_counters", "snapshot_of"])
def test_a_snapshot_that_cannot_be_made_is_a_fault_and_the_next_one_is_sent(
    rig, link, monkeypatch, part
) -> None:
    def fail(*_) -> None:
        raise ZeroDivisionError(part)

    turn = rig.canary._turns

    def advance() -> bool:
        return turn._faults.guard("snapshot", turn._snapshots.advance) or True

    rig.canary._turns._snapshots.finish()
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
    rig.canary._turns._snapshots.finish()
    monkeypatch.setattr(telling, "vitals_with", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        rig.run(3)
