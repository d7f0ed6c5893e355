"""An OTLP receiver on loopback, gRPC or HTTP/protobuf, that can answer with errors."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2, logs_service_pb2_grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

PROTOCOLS = ("grpc", "http/protobuf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A span, a log record or a metric with its resource's attributes."""

    resource: dict[str, Any]
    attributes: dict[str, Any]
    body: Any


class Receiver:
    """Keeps received spans, log records and metrics; with `broken` it answers every request with an error."""

    def __init__(self, *, broken: bool = False) -> None:
        self.broken, self.requests = broken, 0
        self.spans: list[Item] = []
        self.logs: list[Item] = []
        self.metrics: list[Item] = []  # one per metric and request
        self._lock = threading.Lock()

    def receive(self, request: Any) -> bool:
        with self._lock:
            self.requests += 1
            if self.broken:
                return False
            if isinstance(request, trace_service_pb2.ExportTraceServiceRequest):
                self.spans += _items(request.resource_spans, "scope_spans", "spans")
            elif isinstance(request, metrics_service_pb2.ExportMetricsServiceRequest):
                self.metrics += _items(request.resource_metrics, "scope_metrics", "metrics")
            else:
                self.logs += _items(request.resource_logs, "scope_logs", "log_records")
            return True

    def named(self, name: str) -> list[Item]:
        return [item for item in self.spans if item.body.name == name]


def _items(resources: Any, scopes: str, records: str) -> Iterator[Item]:
    for resource in resources:
        for scope in getattr(resource, scopes):
            for record in getattr(scope, records):
                yield Item(
                    resource=plain(resource.resource.attributes),
                    attributes=plain(getattr(record, "attributes", ())),
                    body=record,
                )


def plain(attributes: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind)


class _Grpc(
    trace_service_pb2_grpc.TraceServiceServicer,
    logs_service_pb2_grpc.LogsServiceServicer,
    metrics_service_pb2_grpc.MetricsServiceServicer,
):
    def __init__(self, receiver: Receiver, answer: Any) -> None:
        self._receiver, self._answer = receiver, answer

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802 - gRPC's name
        if not self._receiver.receive(request):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "injected")
        return self._answer()


class GrpcServer:
    def __init__(self, receiver: Receiver) -> None:
        self._server = grpc.server(ThreadPoolExecutor(2))
        traces = _Grpc(receiver, trace_service_pb2.ExportTraceServiceResponse)
        logs = _Grpc(receiver, logs_service_pb2.ExportLogsServiceResponse)
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(traces, self._server)
        logs_service_pb2_grpc.add_LogsServiceServicer_to_server(logs, self._server)
        metrics = _Grpc(receiver, metrics_service_pb2.ExportMetricsServiceResponse)
        metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(metrics, self._server)
        self.url = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def close(self) -> None:
        self._server.stop(0).wait()


class HttpServer:
    def __init__(self, receiver: Receiver) -> None:
        kinds = {
            "/v1/traces": trace_service_pb2.ExportTraceServiceRequest,
            "/v1/metrics": metrics_service_pb2.ExportMetricsServiceRequest,
            "/v1/logs": logs_service_pb2.ExportLogsServiceRequest,
        }

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                accepted = receiver.receive(kinds[self.path].FromString(body))
                self.send_response(200 if accepted else 400)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *arguments: object) -> None:
                """Silent."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def open_server(receiver: Receiver, protocol: str) -> GrpcServer | HttpServer:
    return (GrpcServer if protocol == "grpc" else HttpServer)(receiver)
