"""OTLP exporters by the standard OTEL_* variables, each behind a bounded queue; refused loudly when wrong."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, SERVICE_VERSION, Resource

from canary_obs import __version__
from canary_obs.errors import ConfigurationError
from canary_obs.telemetry.export_queue import ExportLimits

DEFAULT_SERVICE_NAME = "canary-obs"
_GENERAL = "OTEL_EXPORTER_OTLP_"
_PROTOCOLS = ("http/protobuf", "grpc")


class Exporter(Protocol):
    """What spans and log records have in common on their way out."""

    def export(self, batch: Sequence[Any], /) -> Any:
        """Deliver a batch, retrying for a while; the result's name is SUCCESS when it was taken."""

    def shutdown(self) -> None:
        """Give up what is under way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    """One signal and the variables that steer it."""

    name: str  # "traces" or "logs"
    processor: str  # prefix of the batch processor's variables

    @property
    def own(self) -> str:
        """Prefix of the signal's own exporter variables."""
        return f"{_GENERAL}{self.name.upper()}_"


TRACES = Signal(name="traces", processor="OTEL_BSP_")
LOGS = Signal(name="logs", processor="OTEL_BLRP_")


def enabled(signal: Signal, environ: Mapping[str, str]) -> bool:
    """Whether its exporter is `otlp`, or an endpoint is named. Raises ConfigurationError."""
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    variable = f"OTEL_{signal.name.upper()}_EXPORTER"
    chosen = environ.get(variable, "").strip()
    if chosen not in ("", "none", "otlp"):
        rule = "not an exporter of canary_obs"
        raise ConfigurationError(variable, chosen, rule, "Use otlp, none, or leave it out.")
    named = any(environ.get(f"{prefix}ENDPOINT", "").strip() for prefix in (_GENERAL, signal.own))
    return chosen == "otlp" or (chosen == "" and named)


def open_exporter(signal: Signal, environ: Mapping[str, str]) -> Exporter:
    """The exporter of a signal; endpoints, headers, TLS and timeouts as the SDK reads them."""
    variable = f"{signal.own}PROTOCOL"
    if not environ.get(variable, "").strip():
        variable = f"{_GENERAL}PROTOCOL"
    protocol = environ.get(variable, "").strip() or _PROTOCOLS[0]
    if protocol not in _PROTOCOLS:
        remedy = f"Use {' or '.join(_PROTOCOLS)}."
        raise ConfigurationError(variable, protocol, "not a protocol of canary_obs", remedy)
    try:
        return _exporter(signal, protocol)
    except (ValueError, OSError) as error:
        variable = f"{_GENERAL}* and {signal.own}*"
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
    usual = ExportLimits()
    queue = _positive(f"{signal.processor}MAX_QUEUE_SIZE", usual.queue, environ)
    batch = _positive(f"{signal.processor}MAX_EXPORT_BATCH_SIZE", min(usual.batch, queue), environ)
    delay = _positive(f"{signal.processor}SCHEDULE_DELAY", round(usual.delay * 1000), environ) / 1000
    if batch > queue:
        variable = f"{signal.processor}MAX_EXPORT_BATCH_SIZE"
        rule = f"more than the queue of {queue} holds"
        raise ConfigurationError(variable, batch, rule, f"Use at most {queue}.")
    return ExportLimits(queue=queue, batch=batch, delay=delay)


def _positive(variable: str, usual: int, environ: Mapping[str, str]) -> int:
    text = environ.get(variable, "").strip()
    if not text:
        return usual
    if not text.isdecimal() or int(text) == 0:
        raise ConfigurationError(variable, text, "not a positive whole number", f"The default is {usual}.")
    return int(text)


def service_resource() -> Resource:
    """This process: names and attributes of OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES go first."""
    found = Resource.create({})
    usual = {SERVICE_VERSION: __version__, SERVICE_INSTANCE_ID: str(uuid.uuid4())}
    if str(found.attributes[SERVICE_NAME]).startswith("unknown_service"):
        found = found.merge(Resource({SERVICE_NAME: DEFAULT_SERVICE_NAME}))
    return Resource(usual).merge(found)
