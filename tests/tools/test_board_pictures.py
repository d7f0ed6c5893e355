"""Pictures of the boards: each panel is drawn from what Prometheus answers, or named as not drawn."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dashboards.build import GENERATED
from tests.ops.expressions import panels_of
from tools.pictures.board_page import page_of
from tools.pictures.draw import DRAWS
from tools.pictures.panel_data import Moment
from tools.pictures.units import UNITS, text_of

MOMENT = Moment(end=100.0, seconds=60.0)
BOARDS = [json.loads(path.read_text("utf-8")) for path in sorted(GENERATED.glob("*.json"))]


def answer(path: str, **_: str) -> Any:
    """Three ranks, the second one worst."""
    labels = [{"engine": "e", "instance": "i", "rank": str(rank)} for rank in range(3)]
    values = ("0", "4", "NaN")
    if path == "query":
        return {"result": [{"metric": m, "value": [100, v]} for m, v in zip(labels, values, strict=True)]}
    return {
        "result": [{"metric": m, "values": [[70, v], [100, v]]} for m, v in zip(labels, values, strict=True)]
    }


def nothing(path: str, **_: str) -> Any:
    del path
    return {"result": []}


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board["uid"])
def test_every_panel_of_the_boards_is_drawn(board):
    html, undrawn = page_of(board, answer, str, MOMENT, "")
    assert undrawn == []
    assert html.count("<section") == sum(1 for _ in panels_of(board))
    empty, undrawn = page_of(board, nothing, str, MOMENT, "")
    asking = [panel for panel in panels_of(board) if panel.get("targets")]
    assert (undrawn, empty.count("No data")) == ([], len(asking))


def test_a_panel_that_cannot_be_drawn_is_named_in_the_picture_and_beside_it():
    title = "Ranks by hour"
    first = next(panel for board in BOARDS for panel in panels_of(board) if panel["type"] == "stat")
    for change in (
        {"type": "heatmap"},
        {"fieldConfig": {"defaults": {"unit": "parsec", "thresholds": {"steps": []}}}},
    ):
        board = {"title": "B", "panels": [{**first, "title": title, **change}]}
        html, (line,) = page_of(board, answer, str, MOMENT, "")
        assert "cannot draw the panel" in html
        assert line.startswith(f"B: {title} (")


def test_a_table_has_the_worst_row_first_and_its_states_in_words():
    board = next(board for board in BOARDS if board["uid"] == "kv-canary-engine")
    table = next(panel for panel in panels_of(board) if panel["type"] == "table")
    html, _ = page_of({"title": "B", "panels": [table]}, answer, str, MOMENT, "")
    body = html[html.index("<tbody>") :]
    assert body.index("violated") < body.index(">ok<")


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(0.25, "percentunit", "25%"), (90.0, "s", "1.5 min"), (0.002, "s", "2 ms"), (2048, "bytes", "2 KiB"),
     (1500, "ops", "1.5K ops/s"), (12, "short", "12")],
)  # fmt: skip
def test_values_are_written_with_their_units(value, unit, text):
    assert text_of(value, unit) == text


def test_no_board_has_a_type_or_unit_that_is_not_known():
    for board in BOARDS:
        for panel in panels_of(board):
            assert panel["type"] in {*DRAWS, "row"}
            assert panel.get("fieldConfig", {}).get("defaults", {}).get("unit") in UNITS
