"""Our page equals prometheus_client's, byte for byte."""

from __future__ import annotations

from itertools import accumulate

import msgspec
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString

from canary_obs.hub.hub import Hub
from canary_obs.injection_counts import LATENCY_BOUNDS, Latencies
from canary_obs.telemetry.catalog import Metric, MetricType
from canary_obs.telemetry.exposition import Exposition, Source
from canary_obs.telemetry.prometheus import Family, HubCollector
from tests.service.fakes import hello, identity, snapshot

ACCEPTS = (
    "", "text/plain;version=0.0.4", "*/*",
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75",
)  # fmt: skip
ODD = [0.0, -0.0, -2.5, 1e-9, 0.1, 999_999.0, 1_000_000.0, 123_456_789.25, 1e21, float("inf"), float("nan")]


LIBRARY = {
    MetricType.COUNTER: CounterMetricFamily,
    MetricType.GAUGE: GaugeMetricFamily,
    MetricType.HISTOGRAM: HistogramMetricFamily,
}


class Bridge(Collector):
    """The same families as prometheus_client knows them."""

    def __init__(self, source) -> None:
        self._source = source

    def collect(self):
        return map(for_library, self._source.families())


def for_library(family: Family):
    known = family.metric
    found = LIBRARY[known.type](known.name, known.help, labels=family.labels, unit=known.unit)
    for values, value in family.series:
        if isinstance(value, Latencies):
            bounds = (*map(floatToGoString, LATENCY_BOUNDS), "+Inf")
            found.add_metric(values, list(zip(bounds, accumulate(value.counts), strict=True)), value.seconds)
        elif values in family.exemplars:
            found.add_metric(values, value, exemplar=family.exemplars[values])
        else:
            found.add_metric(values, value)
    return found


class Fixed(Source):
    """The same families each time."""

    def __init__(self, *families: Family) -> None:
        self._families = list(families)

    def families(self):
        return iter(self._families)


def metric(name: str, metric_type: MetricType, *labels: str, unit: str = "", text: str = "seen") -> Metric:
    return Metric(name=name, type=metric_type, unit=unit, labels=labels, help=text)


def odd_values() -> Fixed:
    gauge = metric(
        "odd_seconds", MetricType.GAUGE, "b", "a", unit="seconds", text='back\\slash "quote"\nline'
    )
    series = [((f'x"{number}\n', "y\\z"), value) for number, value in enumerate(ODD)]
    bare = Family(metric("bare", MetricType.GAUGE), (), [((), 7)])
    return Fixed(Family(gauge, gauge.labels, series), bare)


def exemplars() -> Fixed:
    counter = metric("damage_total", MetricType.COUNTER, "reason")
    pointers = {
        ("kv_data",): Exemplar({"trace_id": "ab", "incident": 'i"1'}, 1.0, 12.5),
        ("chain",): Exemplar({"trace_id": "cd"}, 2.0),
    }
    series = [(("kv_data",), 3.0), (("token",), 0.0), (("chain",), 4.0)]
    return Fixed(Family(counter, counter.labels, series, pointers))


def histogram() -> Fixed:
    spread = metric("latency_seconds", MetricType.HISTOGRAM, "mode", "z", unit="seconds")
    counts = tuple(range(len(LATENCY_BOUNDS) + 1))
    series = [((mode, "1"), Latencies(counts=counts, seconds=2.5e6)) for mode in ("a", 'b"')]
    return Fixed(Family(spread, spread.labels, series))


def filled_hub() -> Hub:
    hub = Hub(clock=lambda: 5.0, wall_ns=lambda: 1_000)
    odd = msgspec.structs.replace(identity(), instance='a"b\nc\\d')
    hub.ingest(hello(odd), lambda command: None)
    hub.ingest(snapshot(odd, 3_000_000, violations=2, time_ns=1_000), lambda command: None)
    return hub


def whole_page() -> HubCollector:
    return HubCollector(filled_hub())


def from_library(source: Source, accept: str) -> tuple[bytes, str]:
    encoder, content_type = choose_encoder(accept)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Bridge(source))
    return encoder(registry), content_type


@pytest.mark.parametrize("accept", ACCEPTS)
@pytest.mark.parametrize("make", [odd_values, exemplars, histogram, whole_page])
def test_the_page_is_the_librarys(make, accept: str) -> None:
    # A collector of its own for each: the page shows how long the previous collection took.
    assert Exposition(make()).page(accept) == from_library(make(), accept)


class Changing(Source):
    """What a gauge shows changes from page to page."""

    def __init__(self) -> None:
        self.series: list[tuple[tuple[str, ...], float]] = []

    def families(self):
        gauge = metric("ranks", MetricType.GAUGE, "rank", "state")
        yield Family(gauge, gauge.labels, self.series)


def test_what_is_remembered_from_the_page_before_is_the_names_only() -> None:
    source = Changing()
    exposition = Exposition(source)
    lines = []
    for series in ({("0", "ok"): 1.0, ("1", "ok"): 2.0}, {("1", "ok"): 3.0}, {("0", "ok"): 4.0}, {}):
        source.series = list(series.items())
        lines.append(exposition.page("")[0].decode().splitlines()[2:])
    assert lines == [
        ['ranks{rank="0",state="ok"} 1.0', 'ranks{rank="1",state="ok"} 2.0'],
        ['ranks{rank="1",state="ok"} 3.0'],
        ['ranks{rank="0",state="ok"} 4.0'],
        [],
    ]


def test_both_formats_from_one_memory() -> None:
    hub = filled_hub()
    exposition = Exposition(HubCollector(hub))
    for accept in (*ACCEPTS, *ACCEPTS):
        fresh = Exposition(HubCollector(hub)).page(accept)[0].decode().splitlines()
        same = exposition.page(accept)[0].decode().splitlines()
        # Only the page's own duration comes and goes.
        assert [line for line in same if "scrape_duration" not in line] == [
            line for line in fresh if "scrape_duration" not in line
        ]
