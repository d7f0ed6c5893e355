"""A series' life in three acts, quiet, bad and good again, in promtool's notation."""

from __future__ import annotations

from dataclasses import dataclass

RANK = {"engine": "reference", "instance": "a", "rank": "0", "job": "kv-canary"}
SERVICE = {"instance": "host:9464", "job": "kv-canary"}

HISTORY = 48  # samples after which what a counter began with is no news: more than any window
AWAY = 80  # samples that Prometheus misses


@dataclass(frozen=True, slots=True, kw_only=True)
class Acts:
    """How many samples each act has."""

    quiet: int
    bad: int
    good: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One input series. A gauge holds its value through an act, a counter rises by it per sample.

    `_` as a value = no sample; `stale` ends a series.
    """

    name: str
    labels: dict[str, str]
    quiet: float | str
    bad: float | str
    good: float | str
    rises: bool = False

    def life(self, acts: Acts) -> str:
        """Quiet, bad, good."""
        parts, level = [], 0.0
        for value, samples in ((self.quiet, acts.quiet), (self.bad, acts.bad), (self.good, acts.good)):
            if isinstance(value, str):
                parts.append(f"{value}x{samples}" if value == "_" else value)
            elif self.rises:
                parts.append(f"{level + value:g}+{value:g}x{samples - 1}")
                level += value * samples
            else:
                parts.append(f"{value:g}x{samples - 1}")
        return " ".join(parts)

    def ended(self, acts: Acts) -> str:
        """Bad, then the target is gone."""
        if isinstance(self.bad, str):
            return self.life(acts)
        first = f"0+{self.bad:g}x{acts.bad - 1}" if self.rises else f"{self.bad:g}x{acts.bad - 1}"
        return f"{first} stale _x{acts.good}"

    def restarted(self, acts: Acts) -> str:
        """Healthy, missing for one sample, then from the start: counters at 0 again."""
        if isinstance(self.quiet, str):
            return f"_x{acts.quiet + acts.bad + acts.good}"
        if self.rises:
            step = f"+{self.quiet:g}"
            return f"1000{step}x{acts.quiet} _ 0{step}x{acts.bad + acts.good}"
        return f"{self.quiet:g}x{acts.quiet} _ {self.quiet:g}x{acts.bad + acts.good}"

    def counted_unseen(self, acts: Acts) -> str:
        """Not there, then there with all that the bad act counts; later Prometheus is away for 20 minutes."""
        assert self.rises
        assert not isinstance(self.bad, str)
        total = f"{self.bad * acts.bad:g}"
        return f"_x{acts.quiet} {total}x{acts.bad + acts.good - 1} _x{AWAY} {total}x{acts.good - 1}"

    def selector(self) -> str:
        """The series' name with its labels."""
        inside = ",".join(f'{name}="{value}"' for name, value in self.labels.items())
        return f"{self.name}{{{inside}}}"


def rank_gauge(
    name: str, quiet: float | str, bad: float | str, *, good: float | str | None = None, **labels: str
) -> Series:
    """A gauge of a rank; it gets well as it was unless `good` says otherwise."""
    return Series(
        name=f"kv_canary_{name}",
        labels=RANK | labels,
        quiet=quiet,
        bad=bad,
        good=quiet if good is None else good,
    )


def rank_counter(name: str, quiet: float, bad: float, **labels: str) -> Series:
    """A counter of a rank that rises by so much per sample."""
    return Series(
        name=f"kv_canary_{name}_total", labels=RANK | labels, quiet=quiet, bad=bad, good=quiet, rises=True
    )


def service_counter(name: str, quiet: float, bad: float, **labels: str) -> Series:
    """A counter of the service that rises by so much per sample."""
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
