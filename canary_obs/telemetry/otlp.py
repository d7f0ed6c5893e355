"""OTLP exporters configured by the standard OTEL_* variables. Unusable values raise ConfigurationError."""

from __future__ import annotations

import socket
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from typing import Any, Protocol

from opentelemetry.sdk.resources import (
    HOST_NAME,
    SERVICE_INSTANCE_ID,
    SERVICE_NAME,
    SERVICE_VERSION,
    Resource,
)

from canary_obs import __version__
from canary_obs.errors import ConfigurationError
from canary_obs.telemetry.export_queue import ExportLimits

DEFAULT_SERVICE_NAME = "canary-obs"
_GENERAL = "OTEL_EXPORTER_OTLP_"
_PROTOCOLS = ("http/protobuf", "grpc")


class Exporter(Protocol):
    """The common part of span, log and metric exporters."""

    def export(self, batch: Any, /) -> Enum:
        """Deliver a sequence of spans or log records, or a MetricsData, with retries.

        The result's `name` is SUCCESS when the receiver accepted it.
        """

    def shutdown(self) -> None:
        """Abort the export in progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    """A signal and the prefixes of its variables."""

    name: str  # "traces", "logs" or "metrics"
    module: str  # of the exporter, below the protocol's package
    exporter_class: str
    processor: str = ""  # prefix of the batch processor's variables
    by_endpoint: bool = True  # whether an endpoint enables it, too

    @property
    def exporter(self) -> str:
        """Prefix of the signal's exporter variables."""
        return f"{_GENERAL}{self.name.upper()}_"


TRACES = Signal(
    name="traces", module="trace_exporter", exporter_class="OTLPSpanExporter", processor="OTEL_BSP_"
)
LOGS = Signal(name="logs", module="_log_exporter", exporter_class="OTLPLogExporter", processor="OTEL_BLRP_")
# Off unless asked for: who scrapes /metrics would have every series twice.
METRICS = Signal(
    name="metrics", module="metric_exporter", exporter_class="OTLPMetricExporter", by_endpoint=False
)
_INTERVAL = "OTEL_METRIC_EXPORT_INTERVAL"
_DEFAULT_INTERVAL, _LONGEST_INTERVAL = 60_000, 86_400_000  # ms; the default is the specification's


def enabled(signal: Signal, environ: Mapping[str, str]) -> bool:
    """Whether the signal's exporter is `otlp`, or an endpoint enables it. Raises ConfigurationError."""
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    variable = f"OTEL_{signal.name.upper()}_EXPORTER"
    exporter = environ.get(variable, "").strip()
    if exporter not in ("", "none", "otlp"):
        rule = "not a supported exporter"
        raise ConfigurationError(variable, exporter, rule, "Use otlp or none, or unset it.")
    has_endpoint = any(environ.get(f"{prefix}ENDPOINT", "").strip() for prefix in (_GENERAL, signal.exporter))
    return exporter == "otlp" or (exporter == "" and has_endpoint and signal.by_endpoint)


def open_exporter(signal: Signal, environ: Mapping[str, str]) -> Exporter:
    """The exporter of a signal. The SDK reads endpoint, headers, TLS and timeout from the environment."""
    variable = f"{signal.exporter}PROTOCOL"
    if not environ.get(variable, "").strip():
        variable = f"{_GENERAL}PROTOCOL"
    protocol = environ.get(variable, "").strip() or _PROTOCOLS[0]
    if protocol not in _PROTOCOLS:
        remedy = f"Use {' or '.join(_PROTOCOLS)}."
        raise ConfigurationError(variable, protocol, "not a supported protocol", remedy)
    try:
        return _exporter(signal, protocol)
    except (ValueError, OSError) as error:
        variable = f"{_GENERAL}* and {signal.exporter}*"
        raise ConfigurationError(
            variable, protocol, f"the exporter refused them: {error}", "Correct the variable it names."
        ) from None


def _exporter(signal: Signal, protocol: str) -> Exporter:
    # Loaded on demand: gRPC and requests take a tenth of a second and some MB each.
    package = "grpc" if protocol == "grpc" else "http"
    module = import_module(f"opentelemetry.exporter.otlp.proto.{package}.{signal.module}")
    exporter: Exporter = getattr(module, signal.exporter_class)()
    return exporter


def metric_interval(environ: Mapping[str, str]) -> float:
    """Seconds between exports of metrics. Raises ConfigurationError."""
    interval = _positive(_INTERVAL, _DEFAULT_INTERVAL, environ)
    if interval > _LONGEST_INTERVAL:
        remedy = f"Use at most {_LONGEST_INTERVAL}, which is a day."
        raise ConfigurationError(_INTERVAL, interval, "too long, in milliseconds", remedy)
    return interval / 1000


def limits_of(signal: Signal, environ: Mapping[str, str]) -> ExportLimits:
    """Queue and batch sizes and the delay between batches. Raises ConfigurationError."""
    default = ExportLimits()
    queue = _positive(f"{signal.processor}MAX_QUEUE_SIZE", default.queue, environ)
    batch = _positive(f"{signal.processor}MAX_EXPORT_BATCH_SIZE", min(default.batch, queue), environ)
    delay = _positive(f"{signal.processor}SCHEDULE_DELAY", round(default.delay * 1000), environ) / 1000
    if batch > queue:
        variable = f"{signal.processor}MAX_EXPORT_BATCH_SIZE"
        rule = f"larger than the queue of {queue} items"
        raise ConfigurationError(variable, batch, rule, f"Use at most {queue}.")
    return ExportLimits(queue=queue, batch=batch, delay=delay)


def _positive(variable: str, default: int, environ: Mapping[str, str]) -> int:
    text = environ.get(variable, "").strip()
    if not text:
        return default
    if not text.isdecimal() or int(text) == 0:
        raise ConfigurationError(variable, text, "not a positive whole number", f"The default is {default}.")
    return int(text)


def service_resource() -> Resource:
    """The resource of this process. OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES override its defaults."""
    found = Resource.create({})
    defaults = {
        SERVICE_VERSION: __version__,
        SERVICE_INSTANCE_ID: str(uuid.uuid4()),
        HOST_NAME: socket.gethostname(),
    }
    if str(found.attributes[SERVICE_NAME]).startswith("unknown_service"):
        found = found.merge(Resource({SERVICE_NAME: DEFAULT_SERVICE_NAME}))
    return Resource(defaults).merge(found)
