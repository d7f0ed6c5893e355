"""OTLP exporters configured by the standard OTEL_* variables. Unusable values raise ConfigurationError."""

from __future__ import annotations

import socket
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
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
    """The common part of span and log exporters."""

    def export(self, batch: Sequence[Any], /) -> Enum:
        """Deliver a batch, with retries; the result's `name` is SUCCESS when the receiver accepted it."""

    def shutdown(self) -> None:
        """Abort the export in progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    """A signal and the prefixes of its variables."""

    name: str  # "traces" or "logs"
    processor: str  # prefix of the batch processor's variables

    @property
    def exporter(self) -> str:
        """Prefix of the signal's exporter variables."""
        return f"{_GENERAL}{self.name.upper()}_"


TRACES = Signal(name="traces", processor="OTEL_BSP_")
LOGS = Signal(name="logs", processor="OTEL_BLRP_")


def enabled(signal: Signal, environ: Mapping[str, str]) -> bool:
    """Whether the signal's exporter is `otlp`, or an endpoint is set. Raises ConfigurationError."""
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    variable = f"OTEL_{signal.name.upper()}_EXPORTER"
    exporter = environ.get(variable, "").strip()
    if exporter not in ("", "none", "otlp"):
        rule = "not a supported exporter"
        raise ConfigurationError(variable, exporter, rule, "Use otlp or none, or unset it.")
    has_endpoint = any(environ.get(f"{prefix}ENDPOINT", "").strip() for prefix in (_GENERAL, signal.exporter))
    return exporter == "otlp" or (exporter == "" and has_endpoint)


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
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc import (
            _log_exporter as grpc_logs,
            trace_exporter as grpc_traces,
        )

        return grpc_traces.OTLPSpanExporter() if signal is TRACES else grpc_logs.OTLPLogExporter()
    from opentelemetry.exporter.otlp.proto.http import (
        _log_exporter as http_logs,
        trace_exporter as http_traces,
    )

    return http_traces.OTLPSpanExporter() if signal is TRACES else http_logs.OTLPLogExporter()


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
