"""A real OTLP receiver gets a span per drill and rank, in the trace of the caller."""

from __future__ import annotations

import pytest

from canary_obs.config import ServiceConfig
from canary_obs.hub.drills import RECORDS_KEPT, DrillStore
from canary_obs.hub.hub import Hub
from canary_obs.records import DrillReport
from canary_obs.service.app import create_app
from canary_obs.slot_facts import DrillFinding
from canary_obs.telemetry.tracing import open_tracing
from canary_obs.vocabulary import DrillOutcome
from tests.service.conftest import FakeRank, bearer, client_of
from tests.service.fakes import drilled, identity
from tests.telemetry.receiver import PROTOCOLS, Receiver, open_server

SECRET = "drill-0123456789abcdef"
TRACE, PARENT = "ab" * 16, "cd" * 8
CALLER = f"00-{TRACE}-{PARENT}-01"
SECOND = 1_000_000_000
STATUS_UNSET, STATUS_ERROR = 0, 2


class WallClock:
    """Nanoseconds that a test sets."""

    def __init__(self) -> None:
        self.now = 100 * SECOND

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def exported(environ):
    """Runs something with tracing of a hub open; returns the receiver after both are closed."""

    def run(hub: Hub, act, protocol: str = "http/protobuf") -> Receiver:
        receiver = Receiver()
        server = open_server(receiver, protocol)
        environ(server.url, protocol)
        tracing = open_tracing(hub)
        assert tracing is not None
        act()
        tracing.close()
        server.close()
        assert tracing.counts["traces"].exported == len(receiver.spans)
        return receiver

    return run


def finding(name: str, outcome: DrillOutcome, **more) -> DrillFinding:
    return DrillFinding(id=name, outcome=outcome, **more)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_route_leads_to_spans_in_the_callers_trace(hub, exported, tmp_path, protocol):
    tokens = tmp_path / "tokens.toml"
    tokens.write_text(f'[drills]\ntoken = "{SECRET}"\nscopes = ["inject"]\n')
    tokens.chmod(0o600)
    app = create_app(hub, ServiceConfig(drill_enabled=True, tokens_file=str(tokens)))
    rank = FakeRank(hub)
    answers = []

    def drill() -> None:
        with client_of(app) as client:
            answers.append(client.post("/canary/drill", headers=bearer(SECRET) | {"traceparent": CALLER}))
            answers.append(client.post("/canary/drill", headers=bearer(SECRET) | {"traceparent": "00-ab"}))

    receiver = exported(hub, drill, protocol)
    assert [answer.status_code for answer in answers] == [200, 200]
    assert [answer.json()["traceparent"] for answer in answers] == [CALLER, None]
    named = {item.attributes["kv_canary.drill.id"]: item for item in receiver.named("kv_canary.drill")}
    ours, own = (named[answer.json()["id"]].body for answer in answers)
    assert (ours.trace_id.hex(), ours.parent_span_id.hex()) == (TRACE, PARENT)
    assert own.trace_id.hex() != TRACE
    assert not own.parent_span_id
    (part,) = [one for one in receiver.named("kv_canary.drill.rank") if one.body.trace_id == ours.trace_id]
    assert part.body.parent_span_id == ours.span_id
    assert part.resource["service.instance.id"] == "/".join(map(str, rank.identity.key))
    assert part.attributes == {
        "kv_canary.drill.id": answers[0].json()["id"],
        "kv_canary.drill.outcome": "detected",
        "kv_canary.group": "full",
        "kv_canary.slot": 0,
        "kv_canary.phase": "patrol",
        "kv_canary.reason": "kv_data",
        "kv_canary.latency_steps": 1,
        "kv_canary.latency_ms": 2.5,
    }
    (reported,) = answers[0].json()["ranks"]
    assert part.body.end_time_unix_nano == reported["reported_ns"]
    assert ours.start_time_unix_nano == answers[0].json()["requested_ns"]


def test_times_are_those_of_the_drill_and_of_each_report(exported):
    wall = WallClock()
    hub = Hub(ServiceConfig(), wall_ns=wall)
    ranks = [identity(0), identity(1), identity(2)]

    def drill() -> None:
        drill_id, _ = hub.drills.start(60.0)
        hub.drills.set_expected_ranks(drill_id, [rank.key for rank in ranks])
        wall.now += SECOND
        hub.drills.record_report(drilled(ranks[0], drill_id))
        wall.now += SECOND
        missed = finding(drill_id, DrillOutcome.MISSED, error="no check met it", group="full", slot=9)
        hub.drills.record_report(DrillReport(identity=ranks[1], finding=missed))
        wall.now += SECOND
        hub.drills.finish(drill_id)
        wall.now += SECOND

    receiver = exported(hub, drill)
    (root,), parts = receiver.named("kv_canary.drill"), receiver.named("kv_canary.drill.rank")
    spans = [root.body, *(part.body for part in parts)]
    assert {span.start_time_unix_nano for span in spans} == {100 * SECOND}
    assert [span.end_time_unix_nano // SECOND for span in spans] == [103, 101, 102, 103]
    assert [span.status.code for span in spans] == [STATUS_ERROR, STATUS_UNSET, STATUS_ERROR, STATUS_ERROR]
    texts = ["missed", "", "no check met it", "the rank did not report"]
    assert [span.status.message for span in spans] == texts
    assert root.attributes["kv_canary.drill.outcome"] == root.attributes["error.type"] == "missed"
    assert root.attributes["kv_canary.drill.ranks"] == 3
    assert [part.attributes.get("error.type") for part in parts] == [None, "missed", "unanswered"]
    assert parts[1].attributes["kv_canary.slot"] == 9
    assert "kv_canary.latency_ms" not in parts[1].attributes  # OTLP has no null


def test_a_refused_drill_is_no_error(hub, exported):
    rank = FakeRank(hub)

    def drill() -> None:
        drill_id, _ = hub.drills.start(60.0)
        refused = finding(drill_id, DrillOutcome.REFUSED, error="no free slot")
        hub.drills.record_report(DrillReport(identity=rank.identity, finding=refused))
        hub.drills.set_expected_ranks(drill_id, [rank.identity.key])

    receiver = exported(hub, drill)
    (root,), (part,) = receiver.named("kv_canary.drill"), receiver.named("kv_canary.drill.rank")
    assert root.attributes["kv_canary.drill.outcome"] == "refused"
    assert "error.type" not in root.attributes
    assert root.body.status.code == part.body.status.code == STATUS_UNSET
    assert part.attributes["kv_canary.drill.error"] == "no free slot"


def test_a_drill_that_no_rank_took_part_in_has_no_span(hub, exported):
    def drill() -> None:
        drill_id, _ = hub.drills.start(60.0)
        hub.drills.finish(drill_id)

    assert exported(hub, drill).spans == []


def test_a_drill_is_exported_even_if_its_caller_has_gone(hub, exported):
    def drill() -> None:
        drill_id, result = hub.drills.start(60.0)
        hub.drills.set_expected_ranks(drill_id, [identity().key])
        result.cancel()
        hub.drills.record_report(drilled(identity(), drill_id))

    assert len(exported(hub, drill).named("kv_canary.drill.rank")) == 1


def test_the_latest_drills_are_kept():
    drills = DrillStore()
    ids = []
    for _ in range(RECORDS_KEPT + 3):
        ids.append(drills.start(60.0)[0])
        drills.finish(ids[-1])
    assert [record.id for record in drills.ended()] == ids[3:]
