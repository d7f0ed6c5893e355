"""A real OTLP receiver gets an incident's span with a link to the request that met the damage."""

from __future__ import annotations

from canary_obs.records import Violations
from canary_obs.telemetry.tracing import open_tracing
from tests.service.conftest import FakeRank
from tests.service.fakes import violation
from tests.telemetry.receiver import Receiver, open_server, plain

CALLER = f"00-{'ab' * 16}-{'cd' * 8}-01"


def test_an_incident_links_to_the_callers_of_its_requests_once_each(hub, environ):
    receiver = Receiver()
    server = open_server(receiver, "http/protobuf")
    environ(server.url, "http/protobuf")
    tracing = open_tracing(hub)
    rank = FakeRank(hub)
    rows = (
        violation(1, traceparent=CALLER, request="chat-1"),
        violation(2, traceparent=CALLER, request="chat-1"),
        violation(3, traceparent="made up"),
        violation(4),
    )
    rank.send(Violations(identity=rank.identity, rows=rows))
    tracing.close()
    server.close()
    (incident,) = receiver.named("kv_canary.incident")
    (step,) = receiver.named("kv_canary.step")
    links = {link.span_id.hex(): link for link in incident.body.links}
    assert links.keys() == {step.body.span_id.hex(), "cd" * 8}
    assert len(incident.body.links) == 2
    ours = links["cd" * 8]
    assert ours.trace_id.hex() == "ab" * 16
    assert plain(ours.attributes) == {"kv_canary.request": "chat-1"}
    (end,) = receiver.named("kv_canary.incident.end")
    assert list(end.body.links) == []
