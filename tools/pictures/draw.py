"""A panel as HTML and SVG: stat, table, time series, state timeline and text; rows are headings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from tools.pictures.panel_data import Moment, Series
from tools.pictures.units import text_of

COLOURS = ("#73bf69", "#f2cc0c", "#8ab8ff", "#ff780a", "#f2495c", "#5794f2", "#b877d9", "#705da0", "#37872d")
NO_DATA = '<p class="none">No data</p>'
LEGEND_SHOWN = 8

Draw = Callable[[dict[str, Any], Sequence[Series], Moment], str]


def stat(panel: dict[str, Any], series: Sequence[Series], _: Moment) -> str:
    """The newest value of each series on the colour of its threshold or mapping."""
    cells = [
        f'<div class="stat" style="background:{_colour(panel, one.last)}"><b>{_text(panel, one.last)}</b>'
        + (f"<span>{escape(one.name)}</span>" if len(series) > 1 else "")
        + "</div>"
        for one in series
    ]
    return f'<div class="stats">{"".join(cells)}</div>' if cells else NO_DATA


def table(panel: dict[str, Any], series: Sequence[Series], _: Moment) -> str:
    """A row for each label set, sorted by the first value, the largest first."""
    if not series:
        return NO_DATA
    renamed = next(t["options"]["renameByName"] for t in panel["transformations"] if t["id"] == "organize")
    hidden = {o["matcher"]["options"] for o in panel["fieldConfig"]["overrides"] if _hides(o)}
    titles = list(renamed.values())
    rows: dict[tuple[tuple[str, str], ...], dict[int, float]] = {}
    for one in series:
        labels = tuple((name, value) for name, value in one.labels.items() if name not in hidden)
        rows.setdefault(labels, {})[one.target] = one.last
    ordered = sorted(rows.items(), key=lambda row: -row[1].get(0, float("-inf")))
    room = _room(panel, 21)
    names = list(dict.fromkeys(name for labels, _ in ordered for name, _ in labels))
    head = "".join(f"<th>{escape(name)}</th>" for name in (*names, *titles))
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(dict(labels).get(name, ''))}</td>" for name in names)
        + "".join(_value_cell(panel, title, values.get(at)) for at, title in enumerate(titles)) + "</tr>"
        for labels, values in ordered[:room]
    )  # fmt: skip
    more = len(ordered) - room
    note = f'<p class="more">and {more} further rows</p>' if more > 0 else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{note}"


def _hides(override: dict[str, Any]) -> bool:
    return any(one["id"] == "custom.hidden" and one["value"] for one in override["properties"])


def _value_cell(panel: dict[str, Any], title: str, value: float | None) -> str:
    if value is None:
        return "<td></td>"
    own: dict[str, Any] = {}
    for override in panel["fieldConfig"]["overrides"]:
        if override["matcher"]["options"] == title:
            own |= {one["id"]: one["value"] for one in override["properties"]}
    mapped = _mapping(own.get("mappings") or (), value)
    if mapped:
        return f'<td style="background:{mapped["color"]};color:#fff">{escape(mapped["text"])}</td>'
    return f'<td class="number">{text_of(value, own.get("unit"))}</td>'


def lines(panel: dict[str, Any], series: Sequence[Series], moment: Moment) -> str:
    """One line per series over time, from zero, with the legend's first entries."""
    if not series:
        return NO_DATA
    highest = max(value for one in series for _, value in one.points)
    top = highest * 1.08 if highest > 0 else 1.0
    parts = []
    for share in (0.0, 0.5, 1.0):
        y = 100 - 100 * share
        parts.append(f'<line class="grid" x1="0" x2="1000" y1="{y}" y2="{y}"/>')
    for place, one in enumerate(series):
        spots = [
            f"{1000 * (1 - (moment.end - at) / moment.seconds):.1f},{100 - 100 * max(value, 0.0) / top:.2f}"
            for at, value in one.points
        ]
        colour = COLOURS[place % len(COLOURS)]
        spots = (
            spots
            if len(spots) > 1
            else [spots[0], f"{float(spots[0].split(',')[0]) + 6},{spots[0].split(',')[1]}"]
        )
        parts.append(f'<polyline points="{" ".join(spots)}" stroke="{colour}"/>')
    axis = "".join(f"<span>{_text(panel, top * share)}</span>" for share in (1.0, 0.5, 0.0))
    plot = f'<svg viewBox="0 0 1000 100" preserveAspectRatio="none">{"".join(parts)}</svg>'
    return f'<div class="plot"><div class="axis">{axis}</div>{plot}</div>{_legend(panel, series)}'


def _legend(panel: dict[str, Any], series: Sequence[Series]) -> str:
    shown = [
        f'<span><i style="background:{COLOURS[place % len(COLOURS)]}"></i>'
        f"{escape(one.name)} {_text(panel, one.last)}</span>"
        for place, one in enumerate(series[:LEGEND_SHOWN])
    ]
    if len(series) > LEGEND_SHOWN:
        shown.append(f"<span>and {len(series) - LEGEND_SHOWN} further</span>")
    return f'<p class="legend">{"".join(shown)}</p>'


def states(panel: dict[str, Any], series: Sequence[Series], moment: Moment) -> str:
    """A bar per series; neighbouring points of one value are one stretch, in its mapped colour."""
    if not series:
        return NO_DATA
    bars, room = [], _room(panel, 12)
    for one in series[:room]:
        width = 1000 / max(panel["maxDataPoints"], 1)
        stretches = "".join(
            f'<rect x="{1000 * (1 - (moment.end - at) / moment.seconds) - width:.1f}" y="0" height="10"'
            f' width="{width + 0.5:.1f}" fill="{_colour(panel, value)}"/>'
            for at, value in one.points
        )
        bar = f'<svg viewBox="0 0 1000 10" preserveAspectRatio="none">{stretches}</svg>'
        bars.append(f'<div class="state"><span>{escape(one.name)}</span>{bar}</div>')
    more = len(series) - room
    note = f'<p class="more">and {more} further bars</p>' if more > 0 else ""
    return "".join(bars) + note


def text(panel: dict[str, Any], _: Sequence[Series], __: Moment) -> str:
    """The Markdown as it is written."""
    return f'<pre class="text">{escape(panel["options"]["content"])}</pre>'


DRAWS: dict[str, Draw] = {
    "stat": stat, "table": table, "timeseries": lines, "state-timeline": states, "text": text,
}  # fmt: skip


def _room(panel: dict[str, Any], pixels: int) -> int:
    """How many lines of so many pixels a panel has room for, besides its title, its heads and a note."""
    return max(1, (int(panel["gridPos"]["h"]) * 36 - 70) // pixels)


def _mapping(mappings: Sequence[dict[str, Any]], value: float) -> dict[str, Any] | None:
    for mapping in mappings:
        found: dict[str, Any] | None = mapping["options"].get(f"{value:g}")
        if found is not None:
            return found
    return None


def _colour(panel: dict[str, Any], value: float) -> str:
    defaults = panel["fieldConfig"]["defaults"]
    mapped = _mapping(defaults.get("mappings") or (), value)
    if mapped:
        return str(mapped["color"])
    colour = "#3274d9"
    for step in defaults["thresholds"]["steps"]:
        if step["value"] is None or value >= step["value"]:
            colour = {"blue": "#3274d9"}.get(step["color"], step["color"])
    return colour


def _text(panel: dict[str, Any], value: float) -> str:
    defaults = panel["fieldConfig"]["defaults"]
    mapped = _mapping(defaults.get("mappings") or (), value)
    return escape(mapped["text"] if mapped else text_of(value, defaults.get("unit")))
