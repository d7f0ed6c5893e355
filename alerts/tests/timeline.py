"""Input series in three phases (quiet, bad, good) in promtool's notation."""

from __future__ import annotations

from dataclasses import dataclass

_TARGET = {"job": "kv-canary", "service_address": "host:9464"}
RANK = {"engine": "reference", "instance": "a", "rank": "0", "cluster": "east 1"} | _TARGET
SERVICE = {"instance": "host:9464"} | _TARGET

HISTORY = 48  # samples before a counter's initial value no longer counts: longer than any window
AWAY = 80  # samples that Prometheus misses while it is down


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """The number of samples in each phase."""

    quiet: int
    bad: int
    good: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """An input series. In each phase a gauge keeps the value, a counter rises by it per sample.

    The value `_` = no sample; `stale` ends the series.
    """

    name: str
    labels: dict[str, str]
    quiet: float | str
    bad: float | str
    good: float | str
    rises: bool = False

    def three_phases(self, spans: Spans) -> str:
        """Quiet, bad, good."""
        parts, level = [], 0.0
        for value, samples in (
            (self.quiet, spans.quiet),
            (self.bad, spans.bad),
            (self.good, spans.good),
        ):
            if isinstance(value, str):
                parts.append(f"{value}x{samples}" if value == "_" else value)
            elif self.rises:
                parts.append(f"{level + value:g}+{value:g}x{samples - 1}")
                level += value * samples
            else:
                parts.append(f"{value:g}x{samples - 1}")
        return " ".join(parts)

    def ended(self, spans: Spans) -> str:
        """Bad, then no samples, as the target is gone."""
        if isinstance(self.bad, str):
            return self.three_phases(spans)
        first = f"0+{self.bad:g}x{spans.bad - 1}" if self.rises else f"{self.bad:g}x{spans.bad - 1}"
        return f"{first} stale _x{spans.good}"

    def restarted(self, spans: Spans) -> str:
        """Quiet, without a sample once, then quiet again with counters from 0."""
        if isinstance(self.quiet, str):
            return f"_x{spans.quiet + spans.bad + spans.good}"
        if self.rises:
            step = f"+{self.quiet:g}"
            return f"1000{step}x{spans.quiet} _ 0{step}x{spans.bad + spans.good}"
        return f"{self.quiet:g}x{spans.quiet} _ {self.quiet:g}x{spans.bad + spans.good}"

    def counted_unseen(self, spans: Spans) -> str:
        """Absent, then constant at the bad phase's total; later Prometheus is down for AWAY samples."""
        assert self.rises
        assert not isinstance(self.bad, str)
        total = f"{self.bad * spans.bad:g}"
        return f"_x{spans.quiet} {total}x{spans.bad + spans.good - 1} _x{AWAY} {total}x{spans.good - 1}"

    def selector(self) -> str:
        """The series' name with its labels."""
        labels = ",".join(f'{name}="{value}"' for name, value in self.labels.items())
        return f"{self.name}{{{labels}}}"


def rank_gauge(
    name: str, quiet: float | str, bad: float | str, *, good: float | str | None = None, **labels: str
) -> Series:
    """A gauge of a rank; `good` None = as in the quiet phase."""
    return Series(
        name=f"kv_canary_{name}",
        labels=RANK | labels,
        quiet=quiet,
        bad=bad,
        good=quiet if good is None else good,
    )


def rank_counter(name: str, quiet: float, bad: float, **labels: str) -> Series:
    """A counter of a rank; the values are increases per sample."""
    return Series(
        name=f"kv_canary_{name}_total", labels=RANK | labels, quiet=quiet, bad=bad, good=quiet, rises=True
    )


def service_counter(name: str, quiet: float, bad: float, **labels: str) -> Series:
    """A counter of the service; the values are increases per sample."""
    return Series(
        name=f"kv_canary_{name}_total", labels=SERVICE | labels, quiet=quiet, bad=bad, good=quiet, rises=True
    )


def service_gauge(name: str, quiet: float, bad: float, **labels: str) -> Series:
    """A gauge of the service."""
    return Series(name=f"kv_canary_{name}", labels=SERVICE | labels, quiet=quiet, bad=bad, good=quiet)


def states(bad: str) -> tuple[Series, ...]:
    """The one-hot state: ok, then `bad`, then ok."""
    names = ("ok", "off", "degraded", "blind", "violated")
    return tuple(rank_gauge("state", float(name == "ok"), float(name == bad), state=name) for name in names)
