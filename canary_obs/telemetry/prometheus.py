"""/metrics: a collector over the hub that reads at scrape time and keeps no global state."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from canary_obs import __version__
from canary_obs.pipeline.hub import Hub
from canary_obs.pipeline.ranks import RankView
from canary_obs.records import LATENCY_BOUNDS, Latencies
from canary_obs.telemetry.catalog import RANK_LABELS, RANK_METRICS, SERVICE_METRICS, Kind, Metric
from canary_obs.telemetry.readings import Reading, Spread
from canary_obs.telemetry.service_readings import ServiceView

log = logging.getLogger("canary_obs")

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
Series = Iterable[Reading | Spread]

_FAMILIES: dict[Kind, Any] = {
    Kind.COUNTER: CounterMetricFamily,
    Kind.GAUGE: GaugeMetricFamily,
    Kind.HISTOGRAM: HistogramMetricFamily,
}


class HubCollector(Collector):
    """Every family of the catalogue, from one consistent look at the hub."""

    def __init__(self, hub: Hub, log_dropped: Callable[[], int] = lambda: 0) -> None:
        self._hub, self._log_dropped = hub, log_dropped
        self._seconds: float | None = None
        self._errors = 0

    def describe(self) -> Iterable[Family]:
        """Families without series, so that registering does not collect."""
        return (_family(metric, (), ()) for metric in (*RANK_METRICS, *SERVICE_METRICS))

    def collect(self) -> Iterator[Family]:
        """Every family that can be read; one that cannot is left out and counted."""
        started = time.perf_counter()
        ranks = self._hub.ranks()
        for metric in RANK_METRICS:
            yield from self._guarded(metric, RANK_LABELS, partial(_over, ranks, metric.read))
        state, _ = self._hub.verdict()
        service = ServiceView(
            version=__version__,
            state=state,
            ranks=ranks,
            counts=self._hub.counts(),
            log_dropped=self._log_dropped(),
            scrape_seconds=self._seconds,
            scrape_errors=self._errors,
        )
        for own in SERVICE_METRICS:
            yield from self._guarded(own, (), partial(own.read, service))
        self._seconds = time.perf_counter() - started

    def _guarded(
        self, metric: Metric, labels: tuple[str, ...], read: Callable[[], Series]
    ) -> Iterator[Family]:
        try:
            # A family without series is left out whole: absent is absent.
            if series := list(read()):
                yield _family(metric, labels, series)
        except Exception:  # a family that fails must not take the others with it
            if self._errors == 0:
                log.exception("canary_obs: %s cannot be collected", metric.name)
            self._errors += 1


def registry_for(collector: HubCollector) -> CollectorRegistry:
    """A registry of its own: nothing of the process's default registry is shown."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return registry


def _over(ranks: tuple[RankView, ...], read: Callable[[RankView], Series]) -> Series:
    for rank in ranks:
        own = (rank.identity.engine, rank.identity.instance, str(rank.identity.rank))
        for labels, value in read(rank):
            yield own + labels, value


def _family(metric: Metric, labels: tuple[str, ...], series: Series) -> Family:
    family: Any = _FAMILIES[metric.kind](
        metric.name, metric.help, labels=labels + metric.labels, unit=metric.unit
    )
    for values, value in series:
        if isinstance(value, Latencies):
            family.add_metric(values, _buckets(value), value.seconds)
        else:
            family.add_metric(values, value)
    return family


def _buckets(latencies: Latencies) -> list[tuple[str, float]]:
    names = (*map(floatToGoString, LATENCY_BOUNDS), "+Inf")
    return list(zip(names, accumulate(latencies.counts), strict=True))
