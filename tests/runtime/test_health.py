"""Health: lost kernel runs, and each reason that ends `ok`."""

from __future__ import annotations

import dataclasses

import pytest

from canary_kernels import layout
from canary_kernels.layout import Phase
from canary_obs.config import CanaryConfig
from canary_obs.records import Acknowledge
from canary_obs.runtime.health import Health, HealthInputs
from canary_obs.runtime.run_state import RunState
from canary_obs.vocabulary import State

GOOD = HealthInputs(
    armed=True, paused=False, violations=0, events_dropped=0, messages_dropped=0, peer_age=0.1,
    pipeline_lag_seconds=0.0, coverage=1.0, sweep_coverage=1.0,
    sweep_error=None, sweep_age=1.0, patrol_age=1.0,
)  # fmt: skip


def runs(**found: int) -> list[list[int]]:
    values = [0] * layout.NUM_PHASES
    for name, count in found.items():
        values[Phase[name.upper()]] = count
    return [values]


def test_without_a_problem_the_state_is_ok() -> None:
    assert Health(1, CanaryConfig()).verdict(GOOD) == (State.OK, ())


@pytest.mark.parametrize(
    ("change", "state", "message"),
    [
        ({"violations": 2}, State.VIOLATED, "2 violations"),
        ({"pipeline_lag_seconds": 11.0}, State.BLIND, "11.0 s old"),
        ({"events_dropped": 1}, State.DEGRADED, "1 violation row dropped"),
        ({"messages_dropped": 3}, State.DEGRADED, "3 messages dropped"),
        ({"peer_age": 9.0}, State.DEGRADED, "no message from the service"),
        ({"coverage": 0.5}, State.DEGRADED, "50.0% of KV bytes"),
        ({"sweep_coverage": 0.9}, State.DEGRADED, "the last sweep could check 90.0%"),
        (
            {"sweep_error": "3 of 9 slots are unaccounted for"},
            State.DEGRADED,
            "the last sweep failed: 3 of 9",
        ),
        ({"sweep_age": 4000.0}, State.DEGRADED, "last completed sweep 4000 s ago"),
        ({"patrol_age": 4000.0}, State.DEGRADED, "oldest byte check 4000 s ago"),
        ({"paused": True}, State.DEGRADED, "paused"),
        ({"armed": False}, State.OFF, "mark_ready"),
    ],
)
def test_each_input_can_end_ok(change: dict[str, object], state: State, message: str) -> None:
    found, reasons = Health(1, CanaryConfig()).verdict(dataclasses.replace(GOOD, **change))
    assert found is state
    assert message in reasons[0]


def test_counters_that_waited_for_a_long_step_are_not_stale() -> None:
    health = Health(1, CanaryConfig())
    after = dataclasses.replace(GOOD, pipeline_lag_seconds=20.0, excused_seconds=20.0)
    assert health.verdict(after)[0] is State.OK
    older = dataclasses.replace(after, pipeline_lag_seconds=30.5)
    assert health.verdict(older) == (State.BLIND, ("counters are 30.5 s old",))


def test_a_long_step_excuses_until_its_copies_were_read() -> None:
    run = RunState(long_step_seconds=20.0, long_step_end=100.0)
    assert [run.excused_seconds(now) for now in (100.0, 105.0, 105.1)] == [20.0, 20.0, 0.0]


def test_unknown_ages_do_not_degrade() -> None:
    quiet = dataclasses.replace(GOOD, peer_age=None, sweep_coverage=None, sweep_age=None, patrol_age=None)
    assert Health(1, CanaryConfig()).verdict(quiet)[0] is State.OK


def test_a_lost_run_is_reported_once_until_acknowledged() -> None:
    health = Health(1, CanaryConfig())
    for sequence in range(4):
        health.count_launch(0, Phase.HEAD)
        health.expect_runs(sequence)
    health.compare_runs(0, runs(head=1))
    assert health.verdict(GOOD)[0] is State.OK
    health.compare_runs(1, runs(head=1))  # the second run never happened
    state, reasons = health.verdict(GOOD)
    assert state is State.BLIND
    assert "head kernel of group 0" in reasons[0]
    health.acknowledge(GOOD, Acknowledge())
    health.compare_runs(2, runs(head=2))
    health.compare_runs(3, runs(head=3))
    assert health.verdict(GOOD)[0] is State.OK
    health.count_launch(0, Phase.HEAD)
    health.expect_runs(4)
    health.compare_runs(4, runs(head=3))
    assert health.verdict(GOOD)[0] is State.BLIND


def test_an_unexpected_copy_is_ignored() -> None:
    health = Health(1, CanaryConfig())
    health.count_launch(0, Phase.TAIL)
    health.compare_runs(7, runs(tail=0))
    assert not health.stalled


def test_only_new_faults_count_after_an_acknowledgement() -> None:
    health = Health(1, CanaryConfig())
    health.faults["head"] += 1
    assert health.verdict(GOOD)[0] is State.BLIND
    health.acknowledge(dataclasses.replace(GOOD, violations=5), Acknowledge())
    assert health.verdict(dataclasses.replace(GOOD, violations=5))[0] is State.OK
    assert health.verdict(dataclasses.replace(GOOD, violations=6))[0] is State.VIOLATED


def test_lost_runs_of_unprocessed_copies_are_found_by_later_ones() -> None:
    health = Health(1, CanaryConfig())
    for sequence in range(5):
        health.count_launch(0, Phase.HEAD)
        health.expect_runs(sequence)
    health.compare_runs(3, runs(head=3))
    assert health.stalled == {(0, Phase.HEAD)}
    assert list(health._expected) == [4]
    health.stalled.clear()
    health.compare_runs(4, runs(head=4))
    assert not health.stalled


def test_a_source_adds_its_reasons() -> None:
    class Source:
        def reasons(self) -> list[tuple[State, str]]:
            return [(State.BLIND, "2 forwards were not shown")]

    health = Health(1, CanaryConfig())
    health.add_source(Source())
    assert health.verdict(GOOD) == (State.BLIND, ("2 forwards were not shown",))


def test_an_acknowledgement_covers_what_its_sender_saw() -> None:
    health = Health(1, CanaryConfig())
    found = dataclasses.replace(GOOD, violations=5, events_dropped=2, messages_dropped=2)
    health.faults["head"] += 2
    health.acknowledge(found, Acknowledge(violations=3, faults=1, events_dropped=1, messages_dropped=1))
    state, reasons = health.verdict(found)
    assert state is State.VIOLATED
    assert reasons[0] == "2 violations not acknowledged"
    assert {"1 violation row dropped", "1 message dropped"} <= set(reasons)
    assert any("the observer failed" in reason for reason in reasons)
    health.acknowledge(found, Acknowledge(violations=9, faults=9, events_dropped=9, messages_dropped=9))
    assert health.verdict(found)[0] is State.OK
    assert health.verdict(dataclasses.replace(found, violations=6))[0] is State.VIOLATED
    health.acknowledge(found, Acknowledge(violations=1, faults=0, events_dropped=0, messages_dropped=0))
    assert health.verdict(found)[0] is State.OK


def test_the_acknowledgement_of_an_incident_covers_violations_only_and_can_be_undone() -> None:
    health = Health(1, CanaryConfig())
    found = dataclasses.replace(GOOD, violations=5, events_dropped=2)
    health.acknowledge(found, Acknowledge(violations=5, violations_only=True))
    assert health.verdict(found) == (State.DEGRADED, ("2 violation rows dropped",))
    health.acknowledge(found, Acknowledge(violations=3, violations_only=True))
    assert health.verdict(found)[0] is State.DEGRADED
    health.acknowledge(found, Acknowledge(violations=3, violations_only=True, undo=True))
    assert health.verdict(found)[1][0] == "2 violations not acknowledged"
