"""Numbers and times as people read them."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from rich.text import Text

from canary_obs.cli.output import write_out

_COLOURS = {
    "ok": "green", "passed": "green", "detected": "green", "degraded": "yellow", "running": "cyan",
    "scheduled": "cyan", "blind": "magenta", "failed": "magenta", "cancelled": "yellow", "off": "dim",
    "violated": "bold red", "missed": "bold red", "unanswered": "magenta", "refused": "yellow",
}  # fmt: skip


def coloured(word: str) -> Text:
    """A state or a status in its colour; without a terminal, the word."""
    return Text(word, style=_COLOURS.get(word, ""))


def plain(value: object) -> Text:
    """Any value as text, never as markup."""
    return Text("" if value is None else str(value))


def moment(time_ns: int | None) -> str:
    """A wall time in UTC, to the second; a dash for none."""
    return "-" if time_ns is None else f"{datetime.fromtimestamp(time_ns / 1e9, UTC):%Y-%m-%d %H:%M:%S}Z"


def duration(seconds: float | None) -> str:
    """`0.4 s`, `12 s`, `3 min 20 s`, `2 h 5 min`; a dash for none."""
    if seconds is None:
        return "-"
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    whole = round(seconds)
    return (
        f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"
    )


def rate(slots_per_second: float | None) -> str:
    """Slots per second, with a unit prefix; a dash for none."""
    if slots_per_second is None:
        return "-"
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if slots_per_second >= size:
            return f"{slots_per_second / size:.1f}{unit}/s"
    return f"{slots_per_second:.0f}/s"


def share(part: int, whole: int) -> str:
    """A percentage; 100 % only when nothing is left."""
    if not whole:
        return "-"
    return f"{min(100 * part / whole, 100 if part >= whole else 99.9):.1f} %"


def rank_of(key: list[Any]) -> str:
    """A rank's key on one line."""
    return "/".join(map(str, key))


def print_json(content: Any) -> None:
    """One JSON document."""
    write_out(json.dumps(content, indent=2) + "\n")
