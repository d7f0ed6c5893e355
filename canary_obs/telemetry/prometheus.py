"""/metrics: a collector over the hub that reads at scrape time and keeps no global state."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, samples
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from canary_obs import __version__
from canary_obs.pipeline.hub import Hub
from canary_obs.pipeline.incidents import Exemplar, Lane
from canary_obs.pipeline.ranks import RankView
from canary_obs.records import LATENCY_BOUNDS, Latencies
from canary_obs.telemetry.catalog import PREFIX, RANK_LABELS, RANK_METRICS, SERVICE_METRICS, Kind, Metric
from canary_obs.telemetry.export_queue import ExportCounts
from canary_obs.telemetry.service_readings import ServiceView

log = logging.getLogger("canary_obs")

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
Series = Iterable[tuple[tuple[str, ...], float | Latencies]]

_FAMILIES: dict[Kind, Any] = {
    Kind.COUNTER: CounterMetricFamily,
    Kind.GAUGE: GaugeMetricFamily,
    Kind.HISTOGRAM: HistogramMetricFamily,
}


_WITH_EXEMPLARS = PREFIX + "violations_total"


class HubCollector(Collector):
    """Every family of the catalogue, from one consistent look at the hub."""

    def __init__(
        self,
        hub: Hub,
        log_dropped: Callable[[], int] = lambda: 0,
        exports: Callable[[], Mapping[str, ExportCounts]] = dict,
    ) -> None:
        self._hub, self._log_dropped, self._exports = hub, log_dropped, exports
        self._seconds: float | None = None
        self._errors = 0

    def describe(self) -> Iterable[Family]:
        """Families without series, so that registering does not collect."""
        return (_family(metric, (), ()) for metric in (*RANK_METRICS, *SERVICE_METRICS))

    def collect(self) -> Iterator[Family]:
        """Every family that can be read; one that cannot is left out and counted."""
        started = time.perf_counter()
        ranks = self._hub.ranks()
        exemplars = self._hub.incidents.exemplars()
        for metric in RANK_METRICS:
            for family in self._guarded(metric, RANK_LABELS, partial(_over, ranks, metric.read)):
                if metric.name == _WITH_EXEMPLARS:
                    _point_to_incidents(family, exemplars)
                yield family
        state, _ = self._hub.verdict()
        service = ServiceView(
            version=__version__,
            state=state,
            ranks=ranks,
            counts=self._hub.counts(),
            incidents=tuple(self._hub.incidents.newest_first()),
            incidents_opened=self._hub.incidents.opened,
            drills=self._hub.drills.counts() if self._hub.config.drill_enabled else None,
            exports=self._exports(),
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
    family: Family = _FAMILIES[metric.kind](
        metric.name, metric.help, labels=labels + metric.labels, unit=metric.unit
    )
    for values, value in series:
        if isinstance(family, HistogramMetricFamily):
            assert isinstance(value, Latencies)
            family.add_metric(values, _buckets(value), value.seconds)
        else:
            assert not isinstance(value, Latencies)
            family.add_metric(values, value)
    return family


def _point_to_incidents(family: Family, exemplars: Mapping[Lane, Exemplar]) -> None:
    for index, sample in enumerate(family.samples):
        pointer = exemplars.get(tuple(sample.labels.values())) if exemplars else None
        if pointer is not None and sample.value > 0:
            labels = {"trace_id": pointer.trace_id, "incident_id": pointer.incident}
            family.samples[index] = sample._replace(
                exemplar=samples.Exemplar(labels, 1.0, pointer.time_ns / 1e9)
            )


def _buckets(latencies: Latencies) -> list[tuple[str, float]]:
    names = (*map(floatToGoString, LATENCY_BOUNDS), "+Inf")
    return list(zip(names, accumulate(latencies.counts), strict=True))
