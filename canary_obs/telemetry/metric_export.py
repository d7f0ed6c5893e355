"""Exports the families of /metrics by OTLP, at intervals."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping

from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, Resource

from canary_obs.devices.health import DeviceHealth
from canary_obs.hub.hub import Hub
from canary_obs.telemetry.export_queue import ExportCounts
from canary_obs.telemetry.metric_points import batches
from canary_obs.telemetry.otlp import (
    METRICS,
    Exporter,
    enabled,
    metric_interval,
    open_exporter,
    service_resource,
)
from canary_obs.telemetry.prometheus import Family, HubCollector
from canary_obs.vocabulary import State

POINTS_PER_REQUEST = 1024  # 0.2 MB; with the longest labels 4 MiB, the most that receivers take by gRPC
CLOSE_SECONDS = 3.0


class MetricExport:
    """A thread that exports all families every `interval` seconds, and once more at the end.

    Neither the hub nor a request waits for it.
    """

    def __init__(
        self,
        families: Callable[[], Iterable[Family]],
        exporter: Exporter,
        resource: Resource,
        interval: float,
        on_fault: Callable[[Exception], None],
        *,
        wall_ns: Callable[[], int] = time.time_ns,
        points_per_request: int = POINTS_PER_REQUEST,
    ) -> None:
        self._families, self._exporter, self._resource = families, exporter, resource
        self._interval, self._on_fault, self._wall_ns = interval, on_fault, wall_ns
        self._size = points_per_request
        self._started_ns = wall_ns()
        self._lock = threading.Lock()
        self._exported = self._failed = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="canary-otlp-metrics", daemon=True)
        self._thread.start()

    @property
    def counts(self) -> ExportCounts:
        """Points exported and lost so far."""
        with self._lock:
            return ExportCounts(exported=self._exported, queue_full=0, failed=self._failed)

    def close(self) -> None:
        """Export once more, for at most CLOSE_SECONDS. Idempotent."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._thread.join(CLOSE_SECONDS)
        self._exporter.shutdown()

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            self._export_guarded()
        self._export_guarded()

    def _export_guarded(self) -> None:
        try:
            self._export()
        except Exception as error:  # noqa: BLE001 - counted, so that a failure does not look like a quiet fleet
            self._on_fault(error)

    def _export(self) -> None:
        delivered = True
        for data, points in batches(
            self._families(), self._resource, self._started_ns, self._wall_ns(), self._size
        ):
            # Each request to a receiver that is down takes its whole timeout: the first decides for all.
            delivered = delivered and self._exporter.export(data).name == "SUCCESS"
            with self._lock:
                if delivered:
                    self._exported += points
                else:
                    self._failed += points


def open_metric_export(
    hub: Hub,
    log_dropped: Callable[[], int],
    exports: Callable[[], Mapping[str, ExportCounts]],
    devices: Callable[[], tuple[DeviceHealth, ...]] = tuple,
    environ: Mapping[str, str] | None = None,
) -> MetricExport | None:
    """Start what the OTEL_* variables ask for; None = nothing. Raises ConfigurationError."""
    environ = os.environ if environ is None else environ
    if not enabled(METRICS, environ):
        return None
    interval, exporter = metric_interval(environ), open_exporter(METRICS, environ)

    def on_fault(error: Exception) -> None:
        hub.fault("metric_export", error, State.DEGRADED)

    # The collector of /metrics has the duration and the errors of scrapes; this one has its own.
    collector = HubCollector(hub, log_dropped, exports, devices)
    return MetricExport(collector.families, exporter, metric_resource(environ), interval, on_fault)


def metric_resource(environ: Mapping[str, str]) -> Resource:
    """The service's resource, without a service.instance.id that OTEL_RESOURCE_ATTRIBUTES does not give.

    Prometheus makes it the label `instance`, which is the engine instance's here.
    """
    found = service_resource()
    if SERVICE_INSTANCE_ID in environ.get("OTEL_RESOURCE_ATTRIBUTES", ""):
        return found
    kept = {name: value for name, value in found.attributes.items() if name != SERVICE_INSTANCE_ID}
    return Resource(kept, found.schema_url)
