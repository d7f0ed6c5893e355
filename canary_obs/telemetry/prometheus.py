"""The collector of /metrics: reads the hub at scrape time, without a global registry."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from prometheus_client import samples
from prometheus_client.utils import floatToGoString

from canary_obs import __version__
from canary_obs.devices.health import DeviceHealth
from canary_obs.hub.hub import Hub
from canary_obs.hub.incident_store import Exemplar
from canary_obs.hub.ranks import RankView
from canary_obs.injection_counts import LATENCY_BOUNDS, Latencies
from canary_obs.telemetry.catalog import PREFIX, RANK_LABELS, RANK_METRICS, SERVICE_METRICS, Metric
from canary_obs.telemetry.export_queue import ExportCounts
from canary_obs.telemetry.service_readings import ServiceView

log = logging.getLogger("canary_obs")

Values = tuple[str, ...]
Series = Iterable[tuple[Values, float | Latencies]]

_WITH_EXEMPLARS = PREFIX + "violations_total"
BUCKETS = (*map(floatToGoString, LATENCY_BOUNDS), "+Inf")  # values of label `le` of a Latencies


@dataclass(frozen=True, slots=True)
class Family:
    """A metric with its values: series and exemplars by the values of `labels`."""

    metric: Metric
    labels: Values
    series: Sequence[tuple[Values, float | Latencies]]
    exemplars: Mapping[Values, samples.Exemplar] = field(default_factory=dict)


class HubCollector:
    """Reads every family of the catalogue from the hub."""

    def __init__(
        self,
        hub: Hub,
        log_dropped: Callable[[], int] = lambda: 0,
        exports: Callable[[], Mapping[str, ExportCounts]] = dict,
        devices: Callable[[], tuple[DeviceHealth, ...]] = tuple,
    ) -> None:
        self._hub, self._log_dropped, self._exports, self._devices = hub, log_dropped, exports, devices
        self._seconds: float | None = None  # of the previous collection
        self._errors = 0

    def families(self) -> Iterator[Family]:
        """All families; one that cannot be read is left out and counted."""
        started = time.perf_counter()
        ranks = self._hub.ranks()
        exemplars = {
            labels: _exemplar(exemplar) for labels, exemplar in self._hub.incidents.exemplars().items()
        }
        for metric in RANK_METRICS:
            shown = exemplars if metric.name == _WITH_EXEMPLARS else {}
            yield from self._family(metric, RANK_LABELS, partial(_over_ranks, ranks, metric.read), shown)
        state, _ = self._hub.verdict()
        changed_bits, transferred = self._hub.incidents.damage()
        service = ServiceView(
            version=__version__,
            state=state,
            ranks=ranks,
            missing=self._hub.missing_ranks(),
            counts=self._hub.counts(),
            open_findings=self._hub.incidents.open_findings(),
            incidents_opened=self._hub.incidents.opened,
            drills=self._hub.drills.counts() if self._hub.config.drill_enabled else None,
            exports=self._exports(),
            changed_bits=changed_bits,
            transferred=transferred,
            devices=self._devices(),
            log_dropped=self._log_dropped(),
            scrape_seconds=self._seconds,
            scrape_errors=self._errors,
        )
        for own in SERVICE_METRICS:
            yield from self._family(own, (), partial(own.read, service), {})
        self._seconds = time.perf_counter() - started

    def _family(
        self,
        metric: Metric,
        common_labels: Values,
        read: Callable[[], Series],
        exemplars: Mapping[Values, samples.Exemplar],
    ) -> Iterator[Family]:
        try:
            # A family without series is left out, with its HELP and TYPE lines.
            if series := list(read()):
                counted = {values for values, value in series if value} if exemplars else ()
                shown = {values: exemplars[values] for values in counted if values in exemplars}
                yield Family(metric, common_labels + metric.labels, series, shown)
        except Exception as error:  # noqa: BLE001 - the other families are still collected
            self.failed(metric, error)

    def failed(self, metric: Metric, error: Exception) -> None:
        """Count and log a family that could not be read or written."""
        if self._errors == 0:
            log.error("canary_obs: %s cannot be collected", metric.name, exc_info=error)
        self._errors += 1


def _over_ranks(ranks: tuple[RankView, ...], read: Callable[[RankView], Series]) -> Series:
    for rank in ranks:
        own = (rank.identity.engine, rank.identity.instance, str(rank.identity.rank))
        for labels, value in read(rank):
            yield own + labels, value


def _exemplar(exemplar: Exemplar) -> samples.Exemplar:
    labels = {"trace_id": exemplar.trace_id, "incident_id": exemplar.incident}
    return samples.Exemplar(labels, 1.0, exemplar.time_ns / 1e9)
