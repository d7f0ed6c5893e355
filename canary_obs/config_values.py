"""Settings that are written in a notation of their own."""

from __future__ import annotations

import msgspec

from canary_obs.errors import ConfigurationError
from canary_obs.vocabulary import PerturbMode

_MAX_RANKS = 1 << 16
_UNITS = {"B/s": 1.0, "kB/s": 1e3, "KB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9, "TB/s": 1e12}
_FASTEST = 1e15  # bytes per second


class PatrolBudget(msgspec.Struct, frozen=True, kw_only=True):
    """Either a fraction of the bandwidth measured at attach, or bytes per second; both 0 = off."""

    fraction: float = 0.0
    bytes_per_second: float = 0.0

    @property
    def enabled(self) -> bool:
        """Whether the patrol runs."""
        return self.fraction > 0 or self.bytes_per_second > 0


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


def parse_patrol_budget(text: str, label: str = "patrol_budget") -> PatrolBudget:
    """`1%` or `0.01` of the measured bandwidth, `15GB/s`, or `off`."""
    stripped = text.strip()
    rule, remedy = "not a budget", "Use a share like 1% or 0.01, a rate like 15GB/s, or off."
    if stripped in ("off", "0"):
        return PatrolBudget()
    for unit, factor in sorted(_UNITS.items(), key=lambda item: -len(item[0])):
        if stripped.endswith(unit):
            rate = _positive(stripped.removesuffix(unit), label, text, rule, remedy) * factor
            if rate > _FASTEST:
                raise ConfigurationError(label, text, "more than any memory can read", remedy)
            return PatrolBudget(bytes_per_second=rate)
    share = _positive(stripped.removesuffix("%"), label, text, rule, remedy) / (
        100 if stripped.endswith("%") else 1
    )
    if share > 1:
        raise ConfigurationError(label, text, "more than the whole bandwidth", remedy)
    return PatrolBudget(fraction=share)


def _positive(number: str, label: str, *refusal: str) -> float:
    try:
        value = float(number)
    except ValueError:
        raise ConfigurationError(label, *refusal) from None
    if not 0 <= value < float("inf"):
        raise ConfigurationError(label, *refusal)
    return value


def parse_perturb(text: str, label: str = "perturb") -> dict[PerturbMode, float]:
    """`MODE=PROBABILITY` pairs, comma-separated; the probability is per forward step, 0 < p <= 1."""
    modes: dict[PerturbMode, float] = {}
    names = ", ".join(mode.value for mode in PerturbMode)
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, _, number = item.partition("=")
        try:
            mode, probability = PerturbMode(name), float(number)
        except ValueError:
            mode, probability = None, -1.0
        if mode is None or not 0 < probability <= 1:
            raise ConfigurationError(
                label, item, "not MODE=PROBABILITY with 0 < probability <= 1", f"Modes are: {names}."
            )
        modes[mode] = probability
    return modes
