"""The progress of a sweep on a terminal: a bar per rank, and one over all of them."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from canary_obs.cli.words import duration, rank_of, rate

RANKS_SHOWN = 24  # bars; ranks that are done make room


class SweepBars:
    """Nothing is drawn unless it is enabled."""

    def __init__(self, *, enabled: bool) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}"))
        console = Console(stderr=True)
        self._progress = Progress(*columns, console=console, disable=not enabled)
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def show(self, record: dict[str, Any]) -> None:
        """Draw a sweep's record."""
        left = f"{rate(record['slots_per_second'])}, {duration(record['eta_seconds'])} left"
        self._draw("all", record["checked"], record["total"], f"{record['status']}  {left}")
        running = [part for part in record["ranks"] if part["status"] == "running"]
        shown = running[:RANKS_SHOWN]
        for name in self._tasks.keys() - {rank_of(part["key"]) for part in shown} - {"all"}:
            self._progress.remove_task(self._tasks.pop(name))
        for part in shown:
            seen = part["progress"] or {"checked": 0, "total": 0}
            left = f"{rate(part['slots_per_second'])}, {duration(part['eta_seconds'])} left"
            self._draw(rank_of(part["key"]), seen["checked"], seen["total"], left)

    def _draw(self, name: str, done: int, total: int, text: str) -> None:
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(name, total=None, note="")
        self._progress.update(self._tasks[name], completed=done, total=total or None, note=text)
