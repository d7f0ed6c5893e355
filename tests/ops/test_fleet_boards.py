"""The dashboards over eight engines of 64 ranks: readable legends, queries that cost little, right rows."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from canary_obs.engines.toolkit.service_process import free_port
from dashboards.build import BOARDS, GENERATED, annotation_expressions
from dashboards.panels import DATA_POINTS
from tests.ops.expressions import panels_of, substituted
from tests.ops.fleet import RANKS, FleetService
from tests.ops.monitoring_stack import MonitoringStack, require_monitoring
from tests.pace import slowdown

pytestmark = [pytest.mark.ops, pytest.mark.timeout(300)]

ENGINES = 8
LEGEND_ENTRIES = 70
BOARD_SECONDS = 1.0  # of Prometheus's processor time without its garbage collector's, as on a quiet core
COSTLY_SECONDS = 0.1  # a query that took more is asked again, next to plain work
RANGE_SECONDS = 12.0
RECORDED = f"count(rank:kv_canary_slots_verified:rate1m > 0) == {ENGINES * RANKS}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """A Prometheus with the samples of every service until `end`; it scrapes and evaluates no more."""

    stack: MonitoringStack
    end: float

    def asked(self, target: dict[str, Any], instance: str) -> tuple[int, float]:
        """Series that one target returns, and Prometheus's processor time for it."""
        began = self.seconds()
        return len(self.series(target, instance)), self.seconds() - began

    def series(self, target: dict[str, Any], instance: str) -> list[dict[str, Any]]:
        """What one target of a panel returns, asked as Grafana does."""
        expression = substituted(target["expr"], instance)
        if target.get("instant"):
            return list(self.stack.get("query", query=expression, time=str(self.end))["result"])
        return list(
            self.stack.get(
                "query_range", query=expression, start=str(self.end - RANGE_SECONDS), end=str(self.end),
                step=str(RANGE_SECONDS / DATA_POINTS),
            )["result"]
        )  # fmt: skip

    def seconds(self) -> float:
        """Processor time that Prometheus has taken."""
        fields = Path(f"/proc/{self.stack.processes[-1].pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    require_monitoring()
    services = [FleetService(number) for number in range(ENGINES)]
    stack = MonitoringStack(tmp_path_factory.mktemp("fleet"), free_port(), free_port(), services[0].port, "-")
    try:
        stack.lay_out(*(service.port for service in services[1:]), interval="3s")
        with pytest.MonkeyPatch.context() as environment:
            # Else every third query pays for the garbage of those before it, at twice its own price.
            environment.setenv("GOGC", "off")
            environment.setenv("GOMEMLIMIT", "2GiB")
            stack.start()
        deadline = time.monotonic() + 150
        while not (stack.started() and stack.query(RECORDED)):
            assert time.monotonic() < deadline, stack.logs()
            time.sleep(0.25)
        (end,) = [float(each) for each in stack.get("query", query="time()")["result"][:1]]
        stack.set_interval("1h")
        yield Fleet(stack=stack, end=end)
    finally:
        stack.close()
        for service in services:
            service.close()


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_every_panel_is_readable_and_the_board_is_quick(fleet: Fleet, board, capsys) -> None:
    content = json.loads((GENERATED / f"{board.uid}.json").read_text("utf-8"))
    instance = "engine-3" if board.one_instance else ".*"
    targets = [(panel, target) for panel in panels_of(content) for target in panel.get("targets") or ()]
    took: dict[str, float] = {}
    entries: dict[str, int] = {}
    for panel, target in targets:
        title = panel["title"]
        count, seconds = fleet.asked(target, instance)
        if seconds > COSTLY_SECONDS:
            seconds = min(fleet.asked(target, instance)[1] / slowdown() for _ in range(3))
        entries[title] = entries.get(title, 0) + count
        took[title] = took.get(title, 0.0) + seconds
    most, slowest = (max(each, key=lambda title: each[title]) for each in (entries, took))
    with capsys.disabled():
        print(
            f"\n{board.uid}: {len(targets)} queries, {sum(took.values()):.2f} s of processor time, most for "
            f"{slowest!r} {took[slowest]:.2f} s; most entries: {most!r} {entries[most]}"
        )
    one_engine = {"Ranks, worst first": RANKS * len(board.sections[0].panels[0].queries)}  # a table's cells
    assert {t: n for t, n in entries.items() if n > one_engine.get(t, LEGEND_ENTRIES)} == {}
    assert sum(took.values()) < BOARD_SECONDS


def test_the_worst_engine_and_rank_come_first(fleet: Fleet) -> None:
    stack = fleet.stack
    ranks = stack.query("sort_desc(rank:kv_canary_state:severity > 1)")
    found = [(each["metric"]["instance"], each["metric"]["rank"], each["value"][1]) for each in ranks]
    assert sorted(found[:2]) == [("engine-3", "17", "4"), ("engine-3", "5", "4")]
    assert found[2:] == [("engine-2", "9", "3"), ("engine-1", "40", "2")]
    engines = stack.query("engine:kv_canary_state:severity")
    assert {each["metric"]["instance"]: each["value"][1] for each in engines} == {
        f"engine-{number}": {3: "4", 2: "3", 1: "2"}.get(number, "0") for number in range(ENGINES)
    }


def test_what_was_counted_before_the_first_scrape_is_annotated(fleet: Fleet) -> None:
    expression = substituted(annotation_expressions()["Counted before the first scrape"])
    (first,) = fleet.stack.query("min_over_time(timestamp(rank:kv_canary_violations:total > 0)[10m:1s])")[:1]
    at = float(first["value"][1])
    marked = fleet.stack.get("query", query=expression, time=str(at))["result"]
    assert {(each["metric"]["instance"], each["metric"]["rank"]) for each in marked} == {
        ("engine-3", "5"), ("engine-3", "17"),
    }  # fmt: skip
    assert fleet.stack.get("query", query=expression, time=str(at + 61))["result"] == []
