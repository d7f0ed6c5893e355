"""Tasks of the people who operate a fleet, by the command line alone: docs/cli.md lists their steps."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from tests.cli.conftest import DRILLS

PAGE = Path(__file__).parents[2] / "docs/cli.md"
TASKS = dict(re.findall(r"^\| \d+ \| ([^|]+?) \| (`[^|]+`) \|", PAGE.read_text("utf-8"), re.MULTILINE))
SECONDS: dict[str, float] = {}  # that each task took; shown with -s, at the end of this file


@pytest.fixture
def perform(cli):
    """Carries out a documented task, names filled in; its output, and the exit code of each step."""

    def steps_of(task: str, **names: object):
        outputs, codes, began = [], [], time.perf_counter()
        for step in re.findall(r"`canary-obs ([^`]+)`", TASKS[task]):
            for name, value in names.items():
                step = step.replace(name, str(value))
            code, out, err = cli(step)
            outputs.append(out + err)
            codes.append(code)
        SECONDS[task] = time.perf_counter() - began
        return outputs, codes

    return steps_of


def test_every_task_is_performed_by_a_test():
    source = Path(__file__).read_text("utf-8")
    assert len(TASKS) == 11
    assert [task for task in TASKS if f'perform("{task}"' not in source] == []


def test_is_it_fine_and_which_rank_is_not(perform, fleet):
    assert perform("Is everything checked and fine?")[1] == [0]
    fleet.damage(17)
    (text,), codes = perform("Which rank is not, and why?")
    assert codes == [3]
    assert text.splitlines()[1].strip() == "fake/test/17: 1 violation"


def test_compare_ranks_now(perform):
    (text,), codes = perform("Compare what eight ranks hold, now")
    assert (codes, text.count("passed")) == ([0], 9)


def test_what_was_damaged(perform, fleet):
    incident = fleet.damage(17)
    (listed, shown), _ = perform("What was damaged, where?", ID=incident)
    assert incident in listed
    assert "kv_data" in shown


def test_one_incident_is_known_and_then_it_is_not(perform, fleet):
    first = fleet.damage(17)
    fleet.hub.incidents.tick(float("inf"))
    fleet.damage(18)
    _, codes = perform("One of two incidents is known", ID=first)
    assert codes == [0, 0]
    assert [found.acknowledged for found in fleet.hub.incidents.newest_first()] == [False, True]
    perform("It was not: take that back", ID=first)
    assert not any(found.acknowledged for found in fleet.hub.incidents.newest_first())


def test_maintenance_of_two_ranks(perform):
    (paused, resumed), codes = perform("Pause two ranks for maintenance, then go on")
    assert codes == [0, 0]
    assert "paused: 2 ranks" in paused
    assert "resumed: 2 ranks" in resumed


def test_would_a_fault_be_seen(perform, tmp_path):
    (tmp_path / "token").write_text(DRILLS)
    (text,), codes = perform("Would a fault on rank 3 be seen?", FILE=tmp_path / "token")
    assert (codes, text.count("detected")) == ([0], 1)


def test_a_sweep_disturbs(perform, fleet, cli):
    for rank in fleet.ranks:
        rank.finishes = False
    sweep = fleet.hub.start_sweep(request_of_all()).id
    (listed, ended), codes = perform("Stop a sweep that disturbs", ID=sweep)
    assert sweep in listed
    assert "cancelled" in ended
    assert codes == [0, 0]


def request_of_all():
    from canary_obs.hub.commands import StartSweepRequest

    return StartSweepRequest()


def test_what_is_not_covered_and_the_rules(perform, tmp_path):
    (text,), codes = perform("What is not covered or set up wrong?")
    assert "things looked at" in text
    assert codes == [4]  # no engine of this host could find the service
    _, codes = perform("Install the alert rules", DIR=tmp_path / "alerts")
    assert codes == [0]
    assert (tmp_path / "alerts/rules/damage.yml").is_file()


def test_a_task_takes_seconds():
    for task, seconds in SECONDS.items():
        print(f"{task} {seconds:.1f} s")
