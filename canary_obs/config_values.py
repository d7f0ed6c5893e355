"""Settings that are written in a notation of their own."""

from __future__ import annotations

from canary_obs.errors import ConfigurationError

_MAX_RANKS = 1 << 16


def parse_ranks(text: str, label: str = "expected_ranks") -> tuple[int, ...]:
    """`0-7`, `0,1,4` or both, sorted; empty = not said."""
    numbers: set[int] = set()
    for item in filter(None, (part.strip() for part in text.split(","))):
        first, dash, last = item.partition("-")
        try:
            low = int(first)
            high = int(last) if dash else low
        except ValueError:
            low, high = 0, -1
        if not 0 <= low <= high < _MAX_RANKS:
            rule = f"not a rank or a range of ranks below {_MAX_RANKS}"
            raise ConfigurationError(label, item, rule, "Use numbers and ranges like 0-7,12.")
        numbers.update(range(low, high + 1))
    return tuple(sorted(numbers))
