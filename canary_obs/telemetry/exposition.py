"""The page of /metrics, text or OpenMetrics, written many times faster than prometheus_client does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import Protocol

from prometheus_client.core import Exemplar
from prometheus_client.exposition import choose_encoder
from prometheus_client.utils import floatToGoString

from canary_obs.records import Latencies
from canary_obs.telemetry.catalog import Kind, Metric
from canary_obs.telemetry.prometheus import BUCKETS, Family, Values

_go_text: Callable[[float], str] = floatToGoString  # the library leaves it untyped
_OPEN_METRICS = "application/openmetrics-text"
_PLAIN_BELOW = 1e6  # Go switches to exponents here; below, Python writes a float the same way

# What stands before a series' numbers: one text; of a histogram one per bucket, then count and sum.
_Heads = dict[Values, tuple[str, ...]]


class Source(Protocol):
    """Where the page comes from: HubCollector."""

    def families(self) -> Iterator[Family]:
        """Every family, as of now."""

    def failed(self, metric: Metric, error: Exception) -> None:
        """One of them could not be written, and is left out."""


class Exposition:
    """Writes pages; remembers the names and labels of the page before, which seldom change."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._heads: dict[str, _Heads] = {}

    def page(self, accept: str) -> tuple[bytes, str]:
        """The page and its content type, text or OpenMetrics as the Accept header asks."""
        _, content_type = choose_encoder(accept)
        open_metrics = content_type.startswith(_OPEN_METRICS)
        # Series that are gone are forgotten with the page: what is kept is what the last one showed.
        kept: dict[str, _Heads] = {}
        lines: list[str] = []
        for family in self._source.families():
            name = family.metric.name
            heads: _Heads = {}
            kept[name] = heads
            try:
                lines += [
                    *_heading(family, open_metrics),
                    *_lines(family, self._heads.get(name, heads), heads, open_metrics),
                ]
            except Exception as error:  # noqa: BLE001 - it must not take the others with it
                self._source.failed(family.metric, error)
        self._heads = kept
        if open_metrics:
            lines.append("# EOF")
        lines.append("")
        return "\n".join(lines).encode(), content_type


def _heading(family: Family, open_metrics: bool) -> Iterator[str]:
    metric, documentation = family.metric, family.metric.help
    name = metric.name.removesuffix("_total") if open_metrics else metric.name
    if open_metrics:
        documentation = _escaped(documentation)
    else:
        documentation = documentation.replace("\\", r"\\").replace("\n", r"\n")
    yield f"# HELP {name} {documentation}"
    yield f"# TYPE {name} {metric.kind.value}"
    if open_metrics and metric.unit:
        yield f"# UNIT {name} {metric.unit}"


def _head(family: Family, values: Values) -> tuple[str, ...]:
    name, labels = family.metric.name, dict(zip(family.labels, values, strict=True))
    if family.metric.kind is not Kind.HISTOGRAM:
        return (_series(name, labels),)
    buckets = (_series(f"{name}_bucket", labels | {"le": bound}) for bound in BUCKETS)
    return (*buckets, _series(f"{name}_count", labels), _series(f"{name}_sum", labels))


def _series(name: str, labels: dict[str, str]) -> str:
    inside = ",".join(f'{label}="{_escaped(labels[label])}"' for label in sorted(labels))
    return f"{name}{{{inside}}} " if inside else f"{name} "


def _lines(family: Family, known: _Heads, heads: _Heads, open_metrics: bool) -> Iterator[str]:
    exemplars = family.exemplars if open_metrics else {}
    for values, value in family.series:
        heads[values] = head = known.get(values) or _head(family, values)
        if isinstance(value, Latencies):
            yield from map(str.__add__, head, map(_number, _spread(value)))
            continue
        # Written out here: a call of _number for each would take a quarter of the page's time.
        number = repr(float(value)) if 0 <= value < _PLAIN_BELOW else _go_text(value)
        yield head[0] + number + (_exemplar(exemplars[values]) if values in exemplars else "")


def _spread(latencies: Latencies) -> Iterable[float]:
    up_to = list(accumulate(latencies.counts))
    return (*up_to, up_to[-1], latencies.seconds)


def _number(value: float) -> str:
    return repr(float(value)) if 0 <= value < _PLAIN_BELOW else _go_text(value)


def _exemplar(exemplar: Exemplar) -> str:
    pairs = ",".join(f'{name}="{_escaped(value)}"' for name, value in sorted(exemplar.labels.items()))
    time = "" if exemplar.timestamp is None else f" {exemplar.timestamp}"
    return f" # {{{pairs}}} {_go_text(exemplar.value)}{time}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
