"""The families of /metrics as OpenTelemetry metrics, with the same names and labels.

The SDK's instruments are not used: they would repeat what the hub counts, and a histogram of theirs takes
measurements, whereas ranks report buckets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from opentelemetry.sdk.metrics import Exemplar
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client.samples import Exemplar as PrometheusExemplar

from canary_obs import __version__
from canary_obs.injection_counts import LATENCY_BOUNDS, Latencies
from canary_obs.telemetry.catalog import MetricType
from canary_obs.telemetry.prometheus import Family, Values
from canary_obs.telemetry.spans import SCOPE, span_context_of

# In UCUM. Translators to Prometheus append a unit's name only where the metric's does not have it yet.
_UNITS = {"": "", "seconds": "s", "bytes": "By", "ratio": "1"}
_CUMULATIVE = AggregationTemporality.CUMULATIVE
_SCOPE = InstrumentationScope(SCOPE, __version__)
_UNKNOWN: Any = None  # smallest and largest value: optional in OTLP, not in the SDK's types

Point = tuple[Values, float | Latencies]


def batches(
    families: Iterable[Family], resource: Resource, started_ns: int, now_ns: int, size: int
) -> Iterator[tuple[MetricsData, int]]:
    """The families in requests of at most `size` points, each with its number of points.

    Sums and histograms are cumulative since `started_ns`.
    """
    metrics: list[Metric] = []
    points = 0
    for family in families:
        for first in range(0, len(family.series), size):
            series = family.series[first : first + size]
            if points + len(series) > size:
                yield _data(resource, metrics), points
                metrics, points = [], 0
            metrics.append(_metric(family, series, started_ns, now_ns))
            points += len(series)
    if metrics:
        yield _data(resource, metrics), points


def _data(resource: Resource, metrics: list[Metric]) -> MetricsData:
    scope = ScopeMetrics(scope=_SCOPE, metrics=metrics, schema_url="")
    return MetricsData([ResourceMetrics(resource=resource, scope_metrics=[scope], schema_url="")])


def _metric(family: Family, series: Iterable[Point], started_ns: int, now_ns: int) -> Metric:
    metric, data = family.metric, _sum
    if metric.type is not MetricType.COUNTER:
        data = _gauge if metric.type is MetricType.GAUGE else _histogram
    return Metric(
        name=metric.name.removesuffix("_total"),
        description=metric.help,
        unit=_UNITS[metric.unit],
        data=data(family, series, started_ns, now_ns),
    )


def _sum(family: Family, series: Iterable[Point], started_ns: int, now_ns: int) -> Any:
    return Sum(list(_numbers(family, series, started_ns, now_ns)), _CUMULATIVE, is_monotonic=True)


def _gauge(family: Family, series: Iterable[Point], started_ns: int, now_ns: int) -> Any:
    return Gauge(list(_numbers(family, series, started_ns, now_ns)))


def _numbers(
    family: Family, series: Iterable[Point], started_ns: int, now_ns: int
) -> Iterator[NumberDataPoint]:
    for values, value in series:
        assert not isinstance(value, Latencies)
        exemplar = family.exemplars.get(values)
        yield NumberDataPoint(
            attributes=dict(zip(family.labels, values, strict=True)),
            start_time_unix_nano=started_ns,
            time_unix_nano=now_ns,
            value=value,
            exemplars=[] if exemplar is None else [_exemplar(exemplar, now_ns)],
        )


def _histogram(family: Family, series: Iterable[Point], started_ns: int, now_ns: int) -> Any:
    points = []
    for values, value in series:
        assert isinstance(value, Latencies)
        point = HistogramDataPoint(
            attributes=dict(zip(family.labels, values, strict=True)),
            start_time_unix_nano=started_ns,
            time_unix_nano=now_ns,
            count=sum(value.counts),
            sum=value.seconds,
            bucket_counts=value.counts,
            explicit_bounds=LATENCY_BOUNDS,
            min=_UNKNOWN,
            max=_UNKNOWN,
        )
        points.append(point)
    return Histogram(points, _CUMULATIVE)


def _exemplar(exemplar: PrometheusExemplar, now_ns: int) -> Exemplar:
    incident = exemplar.labels["incident_id"]
    span = span_context_of("incident", incident)
    seconds = exemplar.timestamp
    return Exemplar(
        filtered_attributes={"incident_id": incident},
        value=float(exemplar.value),
        time_unix_nano=now_ns if seconds is None else round(float(seconds) * 1e9),
        span_id=span.span_id,
        trace_id=span.trace_id,
    )
