"""A real OTLP receiver gets sweeps, incidents with links, evidence and one log record per violation."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest
import yaml

from canary_obs.errors import ConfigurationError
from canary_obs.hub.commands import StartSweepRequest
from canary_obs.hub.hub import Hub
from canary_obs.records import CollectEvidence, Evidence, SweepReport, SweepShare, Violations
from canary_obs.slot_facts import ChangedWord, SlotFacts
from canary_obs.telemetry import tracing as tracing_module
from canary_obs.telemetry.tracing import open_tracing
from canary_obs.vocabulary import Part, Phase, Reason, SlotState, SweepStatus
from tests.service.conftest import FakeRank
from tests.service.fakes import eventually, identity, progress, violation
from tests.telemetry.receiver import PROTOCOLS, Receiver, open_server

EXTRA = {"OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=test", "OTEL_SERVICE_NAME": "kv-fleet"}


def evidence_for(command: CollectEvidence) -> Evidence:
    facts = SlotFacts(
        slot=command.slot,
        state=SlotState.COMPLETE,
        position=2,
        recorded={Part.K: "0x1"},
        found={Part.K: "0x2"},
    )
    changed = ChangedWord(
        part=Part.K, layer=3, head=1, element=7, dtype="float16", word=9, original="0x01", current="0x02"
    )
    return Evidence(
        identity=identity(), incident=command.incident, group=command.group, step=6, time_ns=time.time_ns(),
        prompted=False, slot=facts, changed=(changed,), neighbours=(), history=(), writes_known=True,
        holders=("r1",),
    )  # fmt: skip


class RankWithEvidence(FakeRank):
    """A rank that answers CollectEvidence."""

    def execute(self, command) -> None:
        super().execute(command)
        if isinstance(command, CollectEvidence):
            self.send(evidence_for(command))


def swept_and_damaged(hub: Hub) -> str:
    """One sweep that finds damage, and damage at a step; returns the sweep's id."""
    rank = RankWithEvidence(hub, finishes=False)
    sweep = hub.start_sweep(StartSweepRequest())
    found = violation(3, sweep_id=sweep.id)
    at_step = violation(4, phase=Phase.HEAD, reason=Reason.CHAIN, part=None, step=77, expected=None)
    share = SweepShare(group="full", total=100, checked=100, violations=1, began=0.1, ended=0.4)
    ended = progress(sweep.id, SweepStatus.VIOLATED, checked=100, violations=1, shares=(share,))
    rank.send(Violations(identity=rank.identity, rows=(found, at_step)))
    rank.send(SweepReport(identity=rank.identity, progress=ended))
    return sweep.id


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_spans_links_and_logs_arrive(hub, environ, protocol):
    receiver = Receiver()
    server = open_server(receiver, protocol)
    environ(server.url, protocol, **EXTRA)
    tracing = open_tracing(hub)
    assert tracing is not None
    hub.subscribe(tracing)
    sweep_id = swept_and_damaged(hub)
    hub.acknowledge()
    tracing.close()
    tracing.close()
    server.close()
    check_sweep(receiver, sweep_id)
    check_incident(receiver, hub)
    check_logs(receiver, hub)
    assert tracing.counts["traces"].exported == len(receiver.spans) == 8
    assert tracing.counts["logs"].exported == len(receiver.logs) == 2


def check_sweep(receiver: Receiver, sweep_id: str) -> None:
    (root,), (rank,) = receiver.named("kv_canary.sweep"), receiver.named("kv_canary.sweep.rank")
    (group,) = receiver.named("kv_canary.sweep.group")
    assert root.attributes["kv_canary.sweep.id"] == sweep_id
    assert root.body.status.message == "violated"
    assert not root.body.parent_span_id
    assert rank.body.parent_span_id == root.body.span_id
    assert group.body.parent_span_id == rank.body.span_id
    assert {root.body.trace_id, rank.body.trace_id, group.body.trace_id} == {root.body.trace_id}
    assert rank.attributes["kv_canary.slots.checked"] == 100
    assert group.attributes["kv_canary.group"] == "full"
    assert group.body.end_time_unix_nano - group.body.start_time_unix_nano == 300_000_000
    assert root.resource["service.name"] == rank.resource["service.name"] == "kv-fleet"
    assert rank.resource["service.instance.id"] == "fake/test/0"
    assert (rank.resource["kv_canary.rank"], rank.resource["kv_canary.device"]) == (0, "cpu")
    assert root.resource["service.instance.id"] not in ("", rank.resource["service.instance.id"])
    assert rank.resource["deployment.environment.name"] == "test"


def check_incident(receiver: Receiver, hub: Hub) -> None:
    (summary,) = hub.incidents.newest_first()
    (incident,), (end,) = receiver.named("kv_canary.incident"), receiver.named("kv_canary.incident.end")
    assert incident.body.trace_id.hex() == end.body.trace_id.hex() == summary.trace_id
    assert end.body.parent_span_id == incident.body.span_id
    assert not incident.body.parent_span_id
    for span in (incident, end):
        assert span.attributes["kv_canary.incident.id"] == summary.id
        assert span.attributes["kv_canary.violations"] == 2
        assert span.attributes["kv_canary.reasons"] == ["chain", "kv_data"]
        assert span.attributes["error.type"] == "chain"
    assert end.attributes["kv_canary.acknowledged"] is True
    assert end.attributes["kv_canary.incident.open"] is False
    targets = {link.span_id for span in (incident, end) for link in span.body.links}
    (sweep,), (step,) = receiver.named("kv_canary.sweep"), receiver.named("kv_canary.step")
    assert targets == {sweep.body.span_id, step.body.span_id}
    assert step.attributes == {"kv_canary.step": 77, "kv_canary.phase": "head", "error.type": "chain"}
    events = [event for span in (incident, end) for event in span.body.events]
    told = [{pair.key: pair.value.string_value for pair in event.attributes} for event in events]
    assert [event.name for event in events] == ["kv_canary.violation"] * 2
    assert {each["kv_canary.reason"] for each in told} == {"chain", "kv_data"}
    assert {each["kv_canary.request"] for each in told} == {violation(3).request}
    evidence = receiver.named("kv_canary.evidence")
    assert {one.body.parent_span_id for one in evidence} == {incident.body.span_id}
    assert evidence[0].attributes["kv_canary.changed.k"] == "layer 3 head 1 element 7"


def check_logs(receiver: Receiver, hub: Hub) -> None:
    (incident,) = receiver.named("kv_canary.incident")
    for item in receiver.logs:
        assert item.body.event_name == "kv_canary.violation"
        assert item.body.severity_text == "ERROR"
        assert item.body.trace_id == incident.body.trace_id
        assert item.body.span_id == incident.body.span_id
        assert item.attributes["kv_canary.incident"] == hub.incidents.newest_first()[0].id
    by_slot = {item.attributes["kv_canary.slot"]: item.attributes for item in receiver.logs}
    assert by_slot[3]["kv_canary.reason"] == "kv_data"
    assert "kv_canary.expected" not in by_slot[4]


def test_an_open_incident_is_exported_at_the_end(hub, environ):
    receiver = Receiver()
    server = open_server(receiver, "http/protobuf")
    environ(server.url, "http/protobuf")
    tracing = open_tracing(hub)
    swept_and_damaged(hub)
    tracing.close()
    server.close()
    (incident,), (end,) = receiver.named("kv_canary.incident"), receiver.named("kv_canary.incident.end")
    assert end.attributes["kv_canary.incident.open"] is True
    assert incident.resource["service.name"] == "canary-obs"
    assert incident.resource["host.name"] == socket.gethostname()
    (step,) = receiver.named("kv_canary.step")
    assert "host.name" not in step.resource  # the rank may run on another host


def test_an_incident_leaves_when_it_opens(hub, environ):
    receiver = Receiver()
    server = open_server(receiver, "http/protobuf")
    environ(server.url, "http/protobuf")
    tracing = open_tracing(hub)
    swept_and_damaged(hub)
    eventually(lambda: receiver.named("kv_canary.incident"))
    assert receiver.named("kv_canary.incident.end") == []
    assert hub.incidents.newest_first()[0].closed_ns is None
    rank = RankWithEvidence(hub)
    rank.send(Violations(identity=rank.identity, rows=(violation(9, step=78),)))
    tracing.close()
    server.close()
    (incident,), (end,) = receiver.named("kv_canary.incident"), receiver.named("kv_canary.incident.end")
    slots = [
        [pair.value.int_value for event in span.body.events for pair in event.attributes
         if pair.key == "kv_canary.slot"]
        for span in (incident, end)
    ]  # fmt: skip
    assert [sorted(each) for each in slots] == [[3, 4], [9]]  # each violation once
    assert end.attributes["kv_canary.violations"] == 3


def test_a_sweep_is_a_child_of_its_caller(hub, environ):
    receiver = Receiver()
    server = open_server(receiver, "http/protobuf")
    environ(server.url, "http/protobuf")
    tracing = open_tracing(hub)
    caller = f"00-{'ab' * 16}-{'cd' * 8}-01"
    rank = FakeRank(hub, finishes=False)
    sweep = hub.start_sweep(StartSweepRequest(), caller)
    assert sweep.traceparent == caller
    rank.send(Violations(identity=rank.identity, rows=(violation(3, sweep_id=sweep.id),)))
    ended = progress(sweep.id, SweepStatus.VIOLATED, checked=100, violations=1)
    rank.send(SweepReport(identity=rank.identity, progress=ended))
    tracing.close()
    server.close()
    (root,), (part,) = receiver.named("kv_canary.sweep"), receiver.named("kv_canary.sweep.rank")
    assert root.body.trace_id.hex() == part.body.trace_id.hex() == "ab" * 16
    assert root.body.parent_span_id.hex() == "cd" * 8
    assert part.body.parent_span_id == root.body.span_id
    assert root.attributes["error.type"] == part.attributes["error.type"] == "violated"
    (link,) = receiver.named("kv_canary.incident")[0].body.links
    assert (link.trace_id, link.span_id) == (root.body.trace_id, root.body.span_id)


def test_the_settings_of_the_compose_file_deliver(hub, monkeypatch):
    path = Path(__file__).parents[2] / "docker" / "compose.yml"
    settings = yaml.safe_load(path.read_text())["services"]["canary"]["environment"]
    given = {name: value for name, value in settings.items() if name.startswith("OTEL_")}
    receiver = Receiver()
    server = open_server(receiver, "grpc")  # the collector's port 4317 is gRPC's
    assert given["OTEL_EXPORTER_OTLP_ENDPOINT"].endswith(":4317")
    for name, value in (given | {"OTEL_EXPORTER_OTLP_ENDPOINT": server.url}).items():
        monkeypatch.setenv(name, value)
    tracing = open_tracing(hub)
    swept_and_damaged(hub)
    tracing.close()
    server.close()
    assert tracing.counts["traces"].failed == 0
    assert receiver.named("kv_canary.incident")


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_receiver_that_answers_errors_costs_only_what_was_sent(hub, environ, protocol):
    receiver = Receiver(broken=True)
    server = open_server(receiver, protocol)
    environ(server.url, protocol)
    tracing = open_tracing(hub)
    hub.subscribe(tracing)
    swept_and_damaged(hub)
    eventually(lambda: tracing.counts["logs"].failed == 2)
    tracing.close()
    server.close()
    assert receiver.requests >= 2
    assert receiver.spans == []
    counts = tracing.counts["traces"]
    assert (counts.exported, counts.failed + counts.queue_full) == (0, 8)
    assert hub.verdict()[0] != "blind"


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_receiver_that_is_down_delays_no_one_and_is_counted(hub, environ, protocol, monkeypatch):
    monkeypatch.setattr(tracing_module, "CLOSE_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    environ(url, protocol, OTEL_BLRP_MAX_QUEUE_SIZE="10", OTEL_BLRP_MAX_EXPORT_BATCH_SIZE="5")
    tracing = open_tracing(hub)
    hub.subscribe(tracing)
    rank = RankWithEvidence(hub)
    spent = []
    for number in range(100):
        rows = tuple(violation(slot) for slot in range(number % 7, number % 7 + 10))
        started = time.perf_counter()
        rank.send(Violations(identity=rank.identity, rows=rows))
        spent.append(time.perf_counter() - started)
    assert sorted(spent)[50] < 0.01
    assert tracing.counts["logs"].queue_full > 900
    started = time.monotonic()
    tracing.close()
    assert time.monotonic() - started < 5.5
    counts = tracing.counts["logs"]
    assert counts.exported == 0
    eventually(lambda: sum_lost(tracing) == 1000)


def sum_lost(tracing) -> int:
    counts = tracing.counts["logs"]
    return counts.failed + counts.queue_full


@pytest.mark.parametrize(
    ("variables", "signals"),
    [
        ({}, None),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_LOGS_EXPORTER": "none"}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_SDK_DISABLED": "true"}, None),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:1/v1/traces"}, {"traces"}),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_TRACES_EXPORTER": "none"}, {"logs"}),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_LOGS_EXPORTER": "otlp"}, {"traces", "logs"}),
    ],
)
def test_what_is_exported_follows_the_standard_variables(hub, monkeypatch, variables, signals):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    tracing = open_tracing(hub)
    if tracing is None:
        assert signals is None
        return
    assert tracing.counts.keys() == signals
    tracing.close()


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("OTEL_TRACES_EXPORTER", "zipkin"),
        ("OTEL_LOGS_EXPORTER", "console"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json"),
        ("OTEL_EXPORTER_OTLP_LOGS_PROTOCOL", "carrier-pigeon"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "-1"),
        ("OTEL_BLRP_SCHEDULE_DELAY", "soon"),
        ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4096"),
    ],
)
def test_a_wrong_variable_is_refused_by_name(hub, monkeypatch, variable, value):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigurationError) as caught:
        open_tracing(hub)
    assert (caught.value.setting, str(caught.value.value)) == (variable, value)


def test_a_fault_of_tracing_itself_is_seen(hub, environ, monkeypatch):
    environ("http://127.0.0.1:1", "http/protobuf")
    tracing = open_tracing(hub)

    def fail():
        raise RuntimeError("injected")

    monkeypatch.setattr(hub, "sweeps", fail)
    eventually(lambda: hub.counts().faults.get("tracing"))
    monkeypatch.undo()
    tracing.close()
    assert any("tracing: RuntimeError" in reason for reason in hub.verdict()[1])
