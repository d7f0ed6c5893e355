"""What a demo is doing, on standard error: its stages always, a line that moves on terminals only."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live

from canary_obs.cli.output import note
from canary_obs.cli.words import coloured, duration, plain
from canary_obs.demo.plan import Moment, Progress


class DemoProgress(Progress):
    """Use as a context: the line is taken away at its end, so that the summary stands alone."""

    def __init__(self) -> None:
        terminal = sys.stderr is not None and sys.stderr.isatty()
        self._live = (
            Live(console=Console(stderr=True), auto_refresh=False, transient=True) if terminal else None
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def stage(self, text: str) -> None:
        """Say what is being started."""
        note(text)

    def moment(self, now: Moment) -> None:
        """Draw the line again."""
        if self._live is None:
            return
        line = plain(f"running for {duration(now.seconds)}: step {now.steps}, ").append_text(
            coloured(now.state)
        )
        line.append(f"  {now.reason}" if now.reason else "", style="default")
        line.no_wrap, line.overflow = True, "ellipsis"
        self._live.start()
        self._live.update(line, refresh=True)
