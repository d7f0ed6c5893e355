"""Why it may not be known who has read a damaged slot: "nobody" is said only when it is known."""

from __future__ import annotations

from collections.abc import Callable

from canary_obs.engine_api.requests import StoredIn
from canary_obs.runtime.taint.good_checks import GoodTime

Elsewhere = Callable[[], StoredIn | None]
_AT_ATTACH = "requests may have been running when the canary was attached"
_FAULT = "a fault of the canary: which requests hold which blocks is not known since"


class Doubts:
    """Reasons, the gravest first."""

    def __init__(self, outside: Callable[[], str | None], elsewhere: Elsewhere) -> None:
        """`outside`: why a good check or a reader may be missing; None = nothing is known to be.

        `elsewhere`: where copies may be from which others read what was computed from damage; None = nowhere.
        """
        self._outside, self.elsewhere, self._lost = outside, elsewhere, ""
        self.dropping = False  # findings were lost among those that are read now

    def start(self, *, nobody_runs: bool) -> None:
        """Everything before is forgotten."""
        self._lost, self.dropping = "" if nobody_runs else _AT_ATTACH, False

    def lose(self) -> None:
        """What the engine showed could not be followed."""
        self._lost = _FAULT

    def since(self, good: GoodTime, step: int, forgotten: int) -> str | None:
        """Why it is not known who has read since a good check; forwards up to `forgotten` are not known."""
        if self._lost:
            return self._lost
        if self.dropping:
            return f"findings were dropped at step {step}: who read other damage is not known"
        if good.first_forward <= forgotten:
            return f"requests of forwards up to {forgotten} are forgotten; the last good check is older"
        return self._outside()
