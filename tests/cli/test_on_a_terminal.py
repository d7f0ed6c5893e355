"""What moves on a real terminal: the bars of `sweep --wait`, and `watch`."""

from __future__ import annotations

import re

import pytest

from canary_obs.records import SweepReport
from canary_obs.vocabulary import SweepStatus
from tests.cli.conftest import TOKEN
from tests.cli.terminal import Terminal
from tests.service.fakes import progress


@pytest.fixture
def on(fleet):
    """Opens a terminal on which a command asks the fleet."""
    opened = []

    def open_terminal(line):
        terminal = Terminal(line, KV_CANARY_URL=fleet.url, KV_CANARY_TOKEN=TOKEN)
        opened.append(terminal)
        return terminal.__enter__()

    yield open_terminal
    for terminal in opened:
        terminal.__exit__()


def test_a_sweep_has_a_bar_for_each_rank_and_one_over_all(fleet, on):
    ranks = fleet.ranks[:3]
    for rank in ranks:
        rank.finishes = False
    terminal = on("sweep --wait --ranks 0-2")
    found = terminal.until(lambda drawn: "fake/test/2" in drawn)
    assert "on 3 ranks; Ctrl-C leaves it running" in found
    (sweep,) = [record for record in fleet.hub.sweeps() if record.ended_ns is None]

    def report(status, checked):
        for rank in ranks:
            part = progress(sweep.id, status, checked=checked, total=1000)
            rank.send(SweepReport(identity=rank.identity, progress=part))

    report(SweepStatus.RUNNING, 400)
    bar = re.compile("fake/test/2 +\u2501+[\u2501\u2578\u257a ]+ .*left")
    terminal.until(lambda drawn: bar.search(drawn) is not None)
    assert re.search("all +\u2501+[\u2501\u2578\u257a ]+ running", terminal.drawn())
    report(SweepStatus.PASSED, 1000)
    assert terminal.end() == 0
    assert f"sweep {sweep.id}: passed" in terminal.drawn()
    assert "\x1b[32m" in terminal.raw(), "in green"


def test_watch_draws_the_ranks_again_when_one_changes(fleet, on):
    terminal = on("watch --interval 0.2 --seconds 20")
    terminal.until(lambda drawn: "64 ok" in drawn)
    fleet.damage(17)
    found = terminal.until(lambda drawn: "fake/test/0 " in drawn.partition("1 violated, 63 ok")[2])
    worst_first = found.partition("1 violated, 63 ok")[2]
    assert worst_first.index("fake/test/17") < worst_first.index("fake/test/0 ")
    assert "\x1b[1;31m" in terminal.raw(), "in red"


@pytest.mark.slow
def test_the_demo_says_what_it_starts_and_then_how_it_runs():
    with Terminal("demo --shape tiny --device cpu --duration 3") as terminal:
        found = terminal.until(
            lambda drawn: re.search(r"running for [\d.]+ s: step \d+, \w+", drawn) is not None
        )
        stages = ("building a small engine", "attaching the canary", "canary attached", "running for")
        places = [found.index(stage) for stage in stages]
        assert places == sorted(places)
        assert terminal.end() == 0
        assert re.search(r"^ +violations +0", terminal.drawn(), re.MULTILINE)
