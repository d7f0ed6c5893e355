"""A whole board as one HTML page, in Grafana's grid of 24 columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from tests.ops.expressions import panels_of
from tools.pictures.draw import DRAWS
from tools.pictures.panel_data import Get, Moment, Series, series_of

ROW_PIXELS = 30
STYLE = (Path(__file__).parent / "board.css").read_text("utf-8")


def page_of(
    board: dict[str, Any], get: Get, fill: Callable[[str], str], moment: Moment, note: str
) -> tuple[str, list[str]]:
    """The page, and a line for every panel that could not be drawn."""
    parts, undrawn = [], []
    for panel in panels_of(board):
        if panel["type"] == "row":
            parts.append(_placed(panel, f"<h2>{escape(panel['title'])}</h2>", "heading"))
            continue
        try:
            body = _drawn(panel, series_of(panel, get, fill, moment), moment)
        except KeyError as error:
            undrawn.append(f"{board['title']}: {panel['title']} ({panel['type']}): {error} is not known here")
            body = '<p class="undrawn">This renderer cannot draw the panel</p>'
        parts.append(_placed(panel, f"<h2>{escape(panel['title'])}</h2>{body}", "panel"))
    title = f"<h1>{escape(board['title'])} <small>{escape(note)}</small></h1>"
    return f"<!doctype html><style>{STYLE}</style>{title}<main>{''.join(parts)}</main>", undrawn


def _drawn(panel: dict[str, Any], series: Sequence[Series], moment: Moment) -> str:
    return DRAWS[panel["type"]](panel, series, moment)


def _placed(panel: dict[str, Any], body: str, kind: str) -> str:
    at = panel["gridPos"]
    place = f"grid-area:{at['y'] + 1}/{at['x'] + 1}/span {at['h']}/span {at['w']}"
    return f'<section class="{kind}" style="{place}">{body}</section>'
