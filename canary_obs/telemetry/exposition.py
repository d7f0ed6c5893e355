"""The page of /metrics as Prometheus text or OpenMetrics, byte for byte as prometheus_client writes it.

Written by hand for speed: a page of 64 ranks took 12 to 13 ms of CPU time, against 97 to 177 ms with
prometheus_client's encoders (7 against 50 to 73 ms on a faster CPU). tests/telemetry/test_exposition.py
compares the pages, and test_detection_latency.py holds the time below 50 ms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import Protocol

from prometheus_client.core import Exemplar
from prometheus_client.exposition import choose_encoder
from prometheus_client.utils import floatToGoString

from canary_obs.injection_counts import Latencies
from canary_obs.telemetry.catalog import Metric, MetricType
from canary_obs.telemetry.prometheus import BUCKETS, Family, Values

_go_float: Callable[[float], str] = floatToGoString  # untyped in the library
_OPEN_METRICS = "application/openmetrics-text"
_PLAIN_BELOW = 1e6  # from here on Go writes an exponent; below, repr() gives the same text

# By label values: the text before the number of each line, `name{labels} `. A histogram has one line per
# bucket, then count and sum; other metrics have a single line.
_LinePrefixes = dict[Values, tuple[str, ...]]


class Source(Protocol):
    """Yields the families of a page: HubCollector."""

    def families(self) -> Iterator[Family]:
        """All families with their current values."""

    def failed(self, metric: Metric, error: Exception) -> None:
        """Report a family that could not be written and is left out."""


class Exposition:
    """Writes pages. Caches the line prefixes of the previous page, as series seldom change."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._cache: dict[str, _LinePrefixes] = {}  # by metric name

    def page(self, accept: str) -> tuple[bytes, str]:
        """The page and its content type, chosen by the Accept header."""
        _, content_type = choose_encoder(accept)
        open_metrics = content_type.startswith(_OPEN_METRICS)
        # Only this page's series are cached, so that series that are gone do not accumulate.
        cache: dict[str, _LinePrefixes] = {}
        lines: list[str] = []
        for family in self._source.families():
            name = family.metric.name
            prefixes: _LinePrefixes = {}
            cache[name] = prefixes
            try:
                lines += [
                    *_heading(family, open_metrics),
                    *_lines(family, self._cache.get(name, prefixes), prefixes, open_metrics),
                ]
            except Exception as error:  # noqa: BLE001 - the other families are still exposed
                self._source.failed(family.metric, error)
        self._cache = cache
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
    yield f"# TYPE {name} {metric.type.value}"
    if open_metrics and metric.unit:
        yield f"# UNIT {name} {metric.unit}"


def _line_prefixes(family: Family, values: Values) -> tuple[str, ...]:
    name, labels = family.metric.name, dict(zip(family.labels, values, strict=True))
    if family.metric.type is not MetricType.HISTOGRAM:
        return (_series(name, labels),)
    buckets = (_series(f"{name}_bucket", labels | {"le": bound}) for bound in BUCKETS)
    return (*buckets, _series(f"{name}_count", labels), _series(f"{name}_sum", labels))


def _series(name: str, labels: dict[str, str]) -> str:
    pairs = ",".join(f'{label}="{_escaped(labels[label])}"' for label in sorted(labels))
    return f"{name}{{{pairs}}} " if pairs else f"{name} "


def _lines(
    family: Family, cached: _LinePrefixes, prefixes: _LinePrefixes, open_metrics: bool
) -> Iterator[str]:
    exemplars = family.exemplars if open_metrics else {}
    for values, value in family.series:
        prefixes[values] = prefix = cached.get(values) or _line_prefixes(family, values)
        if isinstance(value, Latencies):
            yield from map(str.__add__, prefix, map(_number, _histogram_values(value)))
            continue
        # _number inlined: calling it per series takes a quarter of the page's time.
        number = repr(float(value)) if 0 <= value < _PLAIN_BELOW else _go_float(value)
        yield prefix[0] + number + (_exemplar(exemplars[values]) if values in exemplars else "")


def _histogram_values(latencies: Latencies) -> Iterable[float]:
    buckets = list(accumulate(latencies.counts))
    return (*buckets, buckets[-1], latencies.seconds)


def _number(value: float) -> str:
    return repr(float(value)) if 0 <= value < _PLAIN_BELOW else _go_float(value)


def _exemplar(exemplar: Exemplar) -> str:
    pairs = ",".join(f'{name}="{_escaped(value)}"' for name, value in sorted(exemplar.labels.items()))
    time = "" if exemplar.timestamp is None else f" {exemplar.timestamp}"
    return f" # {{{pairs}}} {_go_float(exemplar.value)}{time}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
