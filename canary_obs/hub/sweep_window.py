"""The hours of a day in which a sweep may run."""

from __future__ import annotations

import re
from dataclasses import dataclass

PATTERN = r"^([01][0-9]|2[0-3]):[0-5][0-9]-([01][0-9]|2[0-3]):[0-5][0-9]$"
_DAY = 24 * 60
_MINUTE_NS = 60 * 10**9


@dataclass(frozen=True, slots=True)
class SweepWindow:
    """Minutes of a UTC day, from `first` to before `end`; it may pass midnight. Equal = the whole day."""

    first: int
    end: int

    @classmethod
    def parse(cls, text: str) -> SweepWindow:
        """Read "22:00-05:30". Raises ValueError."""
        if re.match(PATTERN, text) is None:
            raise ValueError(f"{text!r} is not HH:MM-HH:MM")
        first, end = (int(time[:2]) * 60 + int(time[3:]) for time in text.split("-"))
        return cls(first, end)

    def contains(self, wall_ns: int) -> bool:
        """Whether a moment (time.time_ns()) lies in it."""
        minute = wall_ns // _MINUTE_NS % _DAY
        return (minute - self.first) % _DAY < ((self.end - self.first) % _DAY or _DAY)

    def opens_ns(self, wall_ns: int) -> int:
        """When it opens next: `wall_ns` itself where it is open."""
        if self.contains(wall_ns):
            return wall_ns
        minute = wall_ns // _MINUTE_NS
        return (minute + (self.first - minute) % _DAY) * _MINUTE_NS
