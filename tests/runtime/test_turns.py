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

    noting(rig.canary.patrol, "advance")
    noting(telling, "standing_of")
    noting(telling, "group_counters")
    noting(telling, "snapshot_of")
    noting(turns, "obey")
    return done


def test_a_step_takes_one_part_and_each_has_its_turn(rig, monkeypatch) -> None:
    done = note_parts(rig, monkeypatch)
    rig.canary._turns._rotating = True  # as on a GPU
    parts = []
    for _ in range(9):
        rig.canary.patrol._credit = 1.0  # a second of the engine's time
        rig.canary.patrol._timed = False
        rig.canary.after_step()
        parts.append(tuple(done))
        done.clear()
    assert all(len(part) == 1 for part in parts)
    in_turn = [part[0] for part in parts]
    assert in_turn.count("advance") == in_turn.count("obey") == 3
    told = [name for name in in_turn if name in ("standing_of", "group_counters", "snapshot_of")]
    assert told in (
        ["standing_of", "group_counters", "snapshot_of"],
        ["group_counters", "snapshot_of", "standing_of"],
        ["snapshot_of", "standing_of", "group_counters"],
    )


def test_what_has_nothing_to_do_gives_its_turn_away(rig, monkeypatch) -> None:
    done = note_parts(rig, monkeypatch)
    rig.canary._turns._rotating = True  # as on a GPU
    rig.canary.patrol.enabled = False
    monkeypatch.setattr(rig.canary.reporter, "due", lambda _: False)
    rig.canary._turns._telling.finish()
    done.clear()
    for _ in range(5):
        rig.canary.after_step()
    assert done == ["obey"] * 5


def test_on_a_cpu_the_patrol_and_commands_have_every_step(rig, monkeypatch) -> None:
    done = note_parts(rig, monkeypatch)
    rig.canary.patrol._timed = False
    for _ in range(6):
        rig.canary.patrol._credit = 1.0
        rig.canary.after_step()
    assert done.count("advance") == done.count("obey") == 6
    assert done.count("standing_of") == done.count("snapshot_of") == 2


def test_at_rest_nothing_waits(rig, link, monkeypatch) -> None:
    done = note_parts(rig, monkeypatch)
    rig.canary._turns._telling.finish()
    done.clear()
    link.deliver(Pause())
    rig.canary.idle()
    assert {"obey", "standing_of", "group_counters", "snapshot_of"} <= set(done)
    assert rig.canary.paused


def test_verdict_and_counters_of_a_snapshot_are_of_one_moment(rig, link) -> None:
    """Between the parts of a snapshot the engine goes on, and may be struck."""
    canary = rig.canary
    advance = canary._turns._telling.advance
    canary._turns._telling.finish()
    sent(link)
    assert advance()  # the verdict: ok
    slot = int(rig.engine.scheduler.live_slots()[0])
    address = locate_byte(canary.state.groups[0].view.sources[0], slot, 3)
    address.flip(1)
    canary.patrol.whole_cycle()
    canary.pump.drain(canary.step, 1.0)
    assert canary.pump.violations > 0
    assert advance()
    assert advance()
    before, *_ = sent(link)
    assert before.state is State.OK
    assert sum(before.groups["full"].violations[phase][reason] for phase in before.groups["full"].violations
               for reason in before.groups["full"].violations[phase]) == 0  # fmt: skip
    for _ in range(3):
        assert advance()
    after, *_ = sent(link)
    assert after.state is State.VIOLATED
    assert after.sequence == before.sequence + 1
    address.flip(1)


@pytest.mark.parametrize("part", ["standing_of", "group_counters", "snapshot_of"])
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
    monkeypatch.setattr(telling, "standing_of", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        rig.run(3)
