"""A real OTLP receiver gets the families of /metrics: same names, labels and values."""

from __future__ import annotations

import threading
from enum import Enum

import httpx
import pytest
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.sdk.resources import Resource
from prometheus_client.parser import text_string_to_metric_families

from canary_obs.config import ServiceConfig
from canary_obs.errors import ConfigurationError
from canary_obs.hub.hub import Hub
from canary_obs.hub.message_check import LABEL_LENGTH
from canary_obs.injection_counts import LATENCY_BOUNDS, Latencies, PerturbCount
from canary_obs.records import Violations
from canary_obs.serve import ServiceThread
from canary_obs.telemetry import metric_export
from canary_obs.telemetry.catalog import RANK_LABELS, RANK_METRICS, MetricType
from canary_obs.telemetry.export_queue import ExportCounts
from canary_obs.telemetry.metric_export import POINTS_PER_REQUEST, MetricExport, open_metric_export
from canary_obs.telemetry.metric_points import batches
from canary_obs.telemetry.prometheus import Family
from canary_obs.transport.links import LocalLink
from canary_obs.vocabulary import PerturbMode
from tests.service.conftest import FakeRank
from tests.service.fakes import eventually, snapshot, violation
from tests.telemetry.receiver import PROTOCOLS, Item, Receiver, open_server, plain

CUMULATIVE = 2
ON = {"OTEL_METRICS_EXPORTER": "otlp", "OTEL_METRIC_EXPORT_INTERVAL": "20"}
OWN = ("kv_canary_snapshot_age_seconds", "kv_canary_scrape_", "kv_canary_telemetry_")  # change by themselves


class Outcome(Enum):
    """Results of an exporter."""

    SUCCESS = 0
    FAILURE = 1


def data_of(item: Item):
    return getattr(item.body, item.body.WhichOneof("data"))


def points(receiver: Receiver, name: str) -> dict[tuple[tuple[str, str], ...], object]:
    """The latest point of each series of a metric, by its labels."""
    return {
        tuple(sorted(plain(point.attributes).items())): point
        for item in list(receiver.metrics)
        if item.body.name == name
        for point in data_of(item).data_points
    }


def none(*_: object) -> dict:
    return {}


def exporting(hub: Hub) -> MetricExport:
    export = open_metric_export(hub, lambda: 0, none)
    assert export is not None
    return export


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_family_of_the_page_arrives_as_it_is_there(environ, protocol):
    receiver = Receiver()
    server = open_server(receiver, protocol)
    environ(server.url, protocol, **ON, OTEL_TRACES_EXPORTER="none", OTEL_LOGS_EXPORTER="none")
    service = ServiceThread(ServiceConfig(port=0, log_file="/dev/null"), link=LocalLink())
    rank = FakeRank(service.hub)
    count = PerturbCount(
        injected=3, detected=3, latency=Latencies(counts=(0, 2) + (0,) * 12 + (1,), seconds=9.5)
    )
    rank.send(snapshot(rank.identity, 2, perturbations={PerturbMode.REAL_KV_USED: count}))
    page = httpx.get(f"{service.url}/metrics").text
    service.close()
    server.close()
    sent = {item.body.name for item in receiver.metrics}
    for family in text_string_to_metric_families(page):
        assert family.name in sent
        if family.type == "histogram" or family.name.startswith(OWN):
            continue
        found = points(receiver, family.name)
        for sample in family.samples:
            assert found[tuple(sorted(sample.labels.items()))].as_double == sample.value
    (histogram,) = points(receiver, "kv_canary_detection_latency_seconds").values()
    assert tuple(histogram.explicit_bounds) == LATENCY_BOUNDS
    assert tuple(histogram.bucket_counts) == count.latency.counts
    assert (histogram.count, histogram.sum) == (3, 9.5)
    assert not histogram.HasField("min")
    assert service.hub.counts().faults == {}


def test_kinds_units_and_times_follow_the_specification(hub, environ):
    receiver = Receiver()
    server = open_server(receiver, "http/protobuf")
    environ(server.url, "http/protobuf", **ON)
    FakeRank(hub)
    exporting(hub).close()
    server.close()
    bodies = {item.body.name: item.body for item in receiver.metrics}
    steps, age = bodies["kv_canary_steps"], bodies["kv_canary_snapshot_age_seconds"]
    assert steps.sum.is_monotonic
    assert steps.sum.aggregation_temporality == CUMULATIVE
    assert steps.description == "Forward steps observed."
    assert age.WhichOneof("data") == "gauge"
    (latency,) = bodies["kv_canary_detection_latency_seconds"].histogram.data_points
    (step,) = steps.sum.data_points
    assert 0 < step.start_time_unix_nano <= step.time_unix_nano
    assert latency.start_time_unix_nano == step.start_time_unix_nano
    units = {name: bodies[name].unit for name in ("kv_canary_step_seconds", "kv_canary_pool_bytes")}
    assert units == {"kv_canary_step_seconds": "s", "kv_canary_pool_bytes": "By"}
    assert (steps.unit, bodies["kv_canary_patrol_progress_ratio"].unit) == ("", "1")


def test_the_start_stays_while_time_goes_on(hub, environ):
    receiver = Receiver()
    server = open_server(receiver, "http/protobuf")
    environ(server.url, "http/protobuf", **ON)
    FakeRank(hub)
    export = exporting(hub)

    def times() -> set[tuple[int, int]]:
        found = [one for one in list(receiver.metrics) if one.body.name == "kv_canary_steps"]
        return {
            (point.start_time_unix_nano, point.time_unix_nano)
            for one in found
            for point in data_of(one).data_points
        }

    eventually(lambda: len(times()) >= 3)
    export.close()
    export.close()
    server.close()
    assert len({start for start, _ in times()}) == 1


def test_a_violation_has_an_exemplar_that_leads_to_its_incident(hub, environ):
    receiver = Receiver()
    server = open_server(receiver, "http/protobuf")
    environ(server.url, "http/protobuf", **ON)
    rank = FakeRank(hub)
    rank.send(Violations(identity=rank.identity, rows=(violation(3),)))
    rank.send(snapshot(rank.identity, 2, violations=1))
    exporting(hub).close()
    server.close()
    (summary,) = hub.incidents.newest_first()
    found = [point for point in points(receiver, "kv_canary_violations").values() if point.exemplars]
    (point,) = found
    assert plain(point.attributes)["reason"] == "kv_data"
    (exemplar,) = point.exemplars
    assert exemplar.trace_id.hex() == summary.trace_id
    assert exemplar.time_unix_nano == violation().time_ns
    assert plain(exemplar.filtered_attributes) == {"incident_id": summary.id}


@pytest.mark.parametrize("given", [None, "mine"])
def test_the_label_instance_is_left_to_the_engine(hub, environ, given):
    receiver = Receiver()
    server = open_server(receiver, "http/protobuf")
    more = {} if given is None else {"OTEL_RESOURCE_ATTRIBUTES": f"service.instance.id={given}"}
    environ(server.url, "http/protobuf", **ON, **more)
    exporting(hub).close()
    server.close()
    assert {item.resource.get("service.instance.id") for item in receiver.metrics} == {given}
    assert {item.resource["service.name"] for item in receiver.metrics} == {"canary-obs"}


@pytest.mark.parametrize(
    ("variables", "on"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}, False),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://127.0.0.1:1/v1/metrics"}, False),
        ({"OTEL_METRICS_EXPORTER": "none"}, False),
        ({"OTEL_METRICS_EXPORTER": "otlp", "OTEL_SDK_DISABLED": "true"}, False),
        (
            {"OTEL_METRICS_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://127.0.0.1:1/"},
            True,
        ),
    ],
)
def test_it_is_off_unless_asked_for(hub, monkeypatch, variables, on):
    monkeypatch.setattr(metric_export, "CLOSE_SECONDS", 0.01)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    export = open_metric_export(hub, lambda: 0, none)
    assert (export is not None) is on
    if export is not None:
        export.close()


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("OTEL_METRICS_EXPORTER", "prometheus"),
        ("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "http/json"),
        ("OTEL_METRIC_EXPORT_INTERVAL", "0"),
        ("OTEL_METRIC_EXPORT_INTERVAL", "soon"),
        ("OTEL_METRIC_EXPORT_INTERVAL", "86400001"),
    ],
)
def test_a_wrong_variable_is_refused_by_name(monkeypatch, variable, value):
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "otlp")
    monkeypatch.setenv(variable, value)
    before = threading.active_count()
    with pytest.raises(ConfigurationError) as caught:
        ServiceThread(ServiceConfig(port=0, log_file="/dev/null"), link=LocalLink())
    assert (caught.value.setting, str(caught.value.value)) == (variable, value)
    eventually(lambda: threading.active_count() <= before)  # nothing is left open


def test_what_a_broken_receiver_refuses_is_counted(environ):
    receiver = Receiver(broken=True)
    server = open_server(receiver, "http/protobuf")
    environ(server.url, "http/protobuf", **ON, OTEL_TRACES_EXPORTER="none", OTEL_LOGS_EXPORTER="none")
    service = ServiceThread(ServiceConfig(port=0, log_file="/dev/null"), link=LocalLink())
    label = '{cause="export_failed",signal="metrics"}'

    def dropped() -> float:
        lines = httpx.get(f"{service.url}/metrics").text.splitlines()
        prefix = f"kv_canary_telemetry_dropped_total{label} "
        return sum(float(line.removeprefix(prefix)) for line in lines if line.startswith(prefix))

    eventually(dropped)
    service.close()
    server.close()
    assert receiver.metrics == []


class Fleet:
    """Families of `ranks` ranks with a series each, and an exporter that keeps or refuses them."""

    def __init__(self, ranks: int, *results: Outcome) -> None:
        steps = next(metric for metric in RANK_METRICS if metric.name == "kv_canary_steps_total")
        assert steps.type is MetricType.COUNTER
        series = [(("fake", "test", str(number)), float(number)) for number in range(ranks)]
        labels = ("engine", "instance", "rank")
        self.found = [Family(steps, labels, series), Family(steps, labels, series[:1])]
        self.results = list(results)
        self.requests: list[list[int]] = []
        self.faults: list[Exception] = []

    def families(self) -> list[Family]:
        return self.found

    def export(self, data) -> Outcome:
        metrics = data.resource_metrics[0].scope_metrics[0].metrics
        self.requests.append([len(metric.data.data_points) for metric in metrics])
        return self.results.pop(0)

    def shutdown(self) -> None:
        self.results.append(Outcome.FAILURE)

    def exported(self, size: int) -> ExportCounts:
        export = MetricExport(
            self.families, self, Resource({}), 3600.0, self.faults.append, points_per_request=size
        )
        export.close()
        return export.counts


def test_a_large_fleet_is_sent_in_requests_that_a_receiver_takes():
    fleet = Fleet(10, *[Outcome.SUCCESS] * 3)
    assert fleet.exported(4) == ExportCounts(exported=11, queue_full=0, failed=0)
    assert fleet.requests == [[4], [4], [2, 1]]


def test_a_request_with_the_longest_labels_fits_what_receivers_take_by_grpc():
    info = next(metric for metric in RANK_METRICS if metric.name == "kv_canary_rank_info")
    labels = RANK_LABELS + info.labels
    longest = ("x" * LABEL_LENGTH,) * len(labels)
    family = Family(info, labels, [(longest, 1.0)] * POINTS_PER_REQUEST)
    ((data, points),) = batches([family], Resource({}), 1, 2, POINTS_PER_REQUEST)
    assert points == POINTS_PER_REQUEST
    assert encode_metrics(data).ByteSize() < 4 * 1024 * 1024


def test_after_a_failed_request_the_rest_is_given_up():
    fleet = Fleet(10, Outcome.SUCCESS, Outcome.FAILURE, Outcome.SUCCESS)
    assert fleet.exported(4) == ExportCounts(exported=4, queue_full=0, failed=7)
    assert fleet.requests == [[4], [4]]


def test_a_fault_of_the_export_itself_is_seen(hub, environ, monkeypatch):
    environ("http://127.0.0.1:1", "http/protobuf", **ON)
    monkeypatch.setattr(metric_export, "CLOSE_SECONDS", 0.01)

    def fail():
        raise RuntimeError("injected")

    export = exporting(hub)
    with monkeypatch.context() as broken:
        broken.setattr(hub, "ranks", fail)
        eventually(lambda: hub.counts().faults.get("metric_export"))
    export.close()
    state, reasons = hub.verdict()
    assert any("metric_export: RuntimeError" in reason for reason in reasons)
    assert state == "degraded"


def test_closing_does_not_wait_for_a_receiver_that_hangs(monkeypatch):
    monkeypatch.setattr(metric_export, "CLOSE_SECONDS", 0.05)
    entered, released = threading.Event(), threading.Event()

    class Hanging(Fleet):
        def export(self, data) -> Outcome:
            entered.set()
            assert released.wait(10)
            return super().export(data)

        def shutdown(self) -> None:
            super().shutdown()
            released.set()  # as the exporters abort

    fleet = Hanging(1)
    export = MetricExport(fleet.families, fleet, Resource({}), 3600.0, fleet.faults.append)
    export.close()
    assert entered.is_set()
    eventually(lambda: export.counts.failed == 2)
    assert fleet.faults == []
