"""Our page equals prometheus_client's, byte for byte."""

from __future__ import annotations

import msgspec
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from canary_obs.pipeline.hub import Hub
from canary_obs.telemetry.exposition import exposition
from canary_obs.telemetry.prometheus import HubCollector, registry_for
from tests.service.fakes import hello, identity, snapshot

ACCEPTS = (
    "", "text/plain;version=0.0.4", "*/*",
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75",
)  # fmt: skip
ODD = [0.0, -0.0, -2.5, 1e-9, 0.1, 999_999.0, 1_000_000.0, 123_456_789.25, 1e21, float("inf"), float("nan")]


class Fixed(Collector):
    def __init__(self, *families) -> None:
        self.families = families

    def collect(self):
        return self.families


def registry_of(*families) -> CollectorRegistry:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Fixed(*families))
    return registry


def odd_values() -> CollectorRegistry:
    gauge = GaugeMetricFamily("odd_seconds", 'back\\slash "quote"\nline', labels=("b", "a"), unit="seconds")
    for number, value in enumerate(ODD):
        gauge.add_metric((f'x"{number}\n', "y\\z"), value)
    return registry_of(gauge, GaugeMetricFamily("bare", "no labels", value=7))


def exemplars() -> CollectorRegistry:
    counter = CounterMetricFamily("damage_total", "seen", labels=("reason",))
    counter.add_metric(("kv_data",), 3.0, exemplar=Exemplar({"trace_id": "ab", "incident": 'i"1'}, 1.0, 12.5))
    counter.add_metric(("chain",), 4.0, exemplar=Exemplar({"trace_id": "cd"}, 2.0))
    return registry_of(counter)


def whole_page() -> CollectorRegistry:
    hub = Hub(clock=lambda: 5.0, wall_ns=lambda: 1_000)
    odd = msgspec.structs.replace(identity(), instance='a"b\nc\\d')
    hub.ingest(hello(odd), lambda command: None)
    hub.ingest(snapshot(odd, 3_000_000, violations=2, time_ns=1_000), lambda command: None)
    return registry_for(HubCollector(hub))


@pytest.mark.parametrize("accept", ACCEPTS)
@pytest.mark.parametrize("make", [odd_values, exemplars, whole_page])
def test_the_page_is_the_librarys(make, accept: str) -> None:
    encoder, content_type = choose_encoder(accept)
    # A collector of its own for each: the page shows how long the previous collection took.
    assert exposition(make(), accept) == (encoder(make()), content_type)
