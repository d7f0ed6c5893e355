"""Pictures of the Grafana boards over 8 engines of 64 ranks: `python -m tools.pictures.boards`.

No Grafana is needed: a live Prometheus with the rules answers every query of the generated boards, and
tools.pictures.draw draws the answers. What it cannot draw is named, in the picture and at the end.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

from canary_obs.engines.toolkit.service_process import free_port
from dashboards.build import BOARDS, GENERATED
from tests.ops.browser import chromium
from tests.ops.fleet import RANKS, FleetService
from tests.ops.monitoring_stack import MonitoringStack
from tools.pictures.board_page import ROW_PIXELS, page_of
from tools.pictures.panel_data import Moment
from tools.pictures.shot import take

ENGINES, PAGES, INTERVAL = 8, 14, 3  # scrapes, and seconds between them
RECORDED = f"count(rank:kv_canary_slots_verified:rate1m > 0) == {ENGINES * RANKS}"
SHOWN = {"kv-canary-fleet": 47, "kv-canary-engine": 40, "kv-canary-incident": 39}  # rows of the grid
RANGE = Moment(end=0.0, seconds=float(PAGES * INTERVAL))


def filled(expression: str, instance: str) -> str:
    """A query with Grafana's variables as they are for this fleet."""
    values = {
        "$__rate_interval": f"{4 * INTERVAL}s", "$__range": f"{RANGE.seconds:.0f}s", "$instance": instance,
        "$cluster": ".*", "$rank": ".*", "$group": ".*",
    }  # fmt: skip
    for name, value in values.items():
        expression = expression.replace(name, value)
    return expression


def watch(stack: MonitoringStack, services: list[FleetService]) -> Moment:
    """Let Prometheus scrape the fleet until its last page; the range that has data."""
    stack.lay_out(*(service.port for service in services[1:]), interval=f"{INTERVAL}s")
    stack.start()
    deadline = time.monotonic() + 240
    while not (stack.started() and stack.query(RECORDED)):
        if time.monotonic() > deadline:
            raise TimeoutError(stack.logs())
        time.sleep(0.5)
    began = _now(stack)
    while (now := _now(stack)) < began + RANGE.seconds:
        time.sleep(0.5)
    return Moment(end=now, seconds=RANGE.seconds)


def _now(stack: MonitoringStack) -> float:
    return float(stack.get("query", query="time()")["result"][0])


def main() -> None:
    """Take the pictures; fails when a panel of any board cannot be drawn."""
    services = [FleetService(number, PAGES + 12) for number in range(ENGINES)]
    undrawn: list[str] = []
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        stack = MonitoringStack(Path(folder), free_port(), free_port(), services[0].port, "-")
        try:
            moment = watch(stack, services)
            page = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
            for board in BOARDS:
                content = json.loads((GENERATED / f"{board.uid}.json").read_text("utf-8"))
                instance = "engine-3" if board.one_instance else ".*"
                undrawn += draw(page, stack, content, instance, moment)
        finally:
            stack.close()
            for service in services:
                service.close()
    if undrawn:
        raise SystemExit("\n".join(("Not drawn:", *undrawn)))


def draw(
    page: Any, stack: MonitoringStack, board: dict[str, Any], instance: str, moment: Moment
) -> list[str]:
    """One board; only those in SHOWN are kept as pictures."""
    html, undrawn = page_of(
        board, stack.get, lambda text: filled(text, instance), moment,
        f"{ENGINES} engines of {RANKS} simulated ranks, {moment.seconds:.0f} s; drawn without Grafana",
    )  # fmt: skip
    page.set_content(html)
    if rows := SHOWN.get(board["uid"]):
        page.set_viewport_size({"width": 1280, "height": 60 + rows * (ROW_PIXELS + 6)})
        take(page, board["uid"].replace("kv-canary-", "board_"))
    return undrawn


if __name__ == "__main__":
    main()
