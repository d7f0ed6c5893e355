"""Every action of healing, however it ended, is seen wherever an operator may look."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from canary_obs.heals import Heal
from canary_obs.hub.heal_store import HEALS_KEPT, HealStore
from canary_obs.records import Heals, Violations
from canary_obs.service.event_stream import EventKind, EventStream
from canary_obs.telemetry.tracing import open_tracing
from canary_obs.vocabulary import HealAction, HealOutcome, HealPolicy, Reason
from tests.service.fakes import snapshot, violation
from tests.service.test_event_stream import Clock
from tests.service.test_heal import LIMITED
from tests.telemetry.receiver import Receiver, open_server

ROOT = Path(__file__).parents[2]
ENDS = [
    (action, outcome)
    for action in HealAction
    for outcome in HealOutcome
    if action is not HealAction.RELEASE or outcome in (HealOutcome.DONE, HealOutcome.FAILED)
]
each = pytest.mark.parametrize(("action", "outcome"), ENDS)


def heal(action: HealAction, outcome: HealOutcome, incident: str | None) -> Heal:
    """As the healer notes it."""
    asked = action in (HealAction.RECOMPUTE, HealAction.END)
    released = action is HealAction.RELEASE
    return Heal(
        action=action, outcome=outcome, policy=HealPolicy.PROTECT, group="full", block=3, time_ns=7,
        request="r1" if asked else None, incident=None if released else incident,
        reason=None if released else Reason.KV_DATA, blocks=2 if action is HealAction.EVICT else 0,
        detail="because" if outcome is HealOutcome.LIMITED else None,
    )  # fmt: skip


@each
def test_in_its_incident_and_as_an_event(
    client: Any, hub: Any, rank: Any, action: HealAction, outcome: HealOutcome
) -> None:
    stream = EventStream(hub, Clock())
    rank.send(Violations(identity=rank.identity, rows=(violation(),), incidents=("as the rank names it",)))
    stream.poll()
    start = stream.last_number
    done = heal(action, outcome, "as the rank names it")
    rank.send(Heals(identity=rank.identity, rows=(done,)))
    stream._polled_at = float("-inf")
    stream.poll()
    stream._polled_at = float("-inf")
    stream.poll()
    (event,) = (event for event in stream.after(start) if event.kind is EventKind.HEAL)
    (incident,) = client.get("/canary/incidents").json()["incidents"]
    released = action is HealAction.RELEASE
    assert (event.data.heal, event.data.identity) == (done, rank.identity)
    assert event.data.incident == (None if released else incident["id"])
    shown = client.get(f"/canary/incidents/{incident['id']}").json()["incident"]["heals"]
    assert [one["action"] for one in shown] == ([] if released else [action.value])


@each
def test_as_a_metric_and_in_the_state_of_the_rank(
    client: Any, rank: Any, action: HealAction, outcome: HealOutcome
) -> None:
    rank.send(snapshot(rank.identity, 2, healing=LIMITED, heals={action: {outcome: 3}}))
    rows = [line for line in client.get("/metrics").text.splitlines() if "kv_canary_heals_total{" in line]
    (row,) = (line for line in rows if not line.endswith(" 0.0"))
    assert f'action="{action.value}"' in row
    assert f'outcome="{outcome.value}"' in row
    (shown,) = client.get("/canary/heal").json()["ranks"]
    assert shown["actions"] == {action.value: {outcome.value: 3}}


@pytest.fixture
def spans(hub: Any, rank: Any, monkeypatch: pytest.MonkeyPatch) -> Receiver:
    """Of one action of each kind and end, in one incident."""
    receiver = Receiver()
    server = open_server(receiver, "http/protobuf")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", server.url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    tracing = open_tracing(hub)
    assert tracing is not None
    rank.send(Violations(identity=rank.identity, rows=(violation(),)))
    (incident,) = hub.incidents.newest_first()
    rank.send(Heals(identity=rank.identity, rows=tuple(heal(*end, incident.id) for end in ENDS)))
    tracing.close()
    server.close()
    return receiver


def test_as_a_span(spans: Receiver) -> None:
    (root,) = (span.body for span in spans.named("kv_canary.incident"))
    seen = []
    for span in spans.named("kv_canary.heal"):
        facts = span.attributes
        end = HealAction(facts["kv_canary.heal.action"]), HealOutcome(facts["kv_canary.heal.outcome"])
        seen.append(end)
        released = end[0] is HealAction.RELEASE
        assert (span.body.trace_id == root.trace_id) == (not released)
        assert facts.get("error.type") == ("failed" if end[1] is HealOutcome.FAILED else None)
        assert facts.get("kv_canary.heal.detail") == ("because" if end[1] is HealOutcome.LIMITED else None)
        assert facts["kv_canary.heal.block"] == 3
    assert seen == ENDS


def test_the_last_ones_are_kept(hub: Any, rank: Any) -> None:
    store = HealStore(hub.incidents)
    done = heal(HealAction.END, HealOutcome.DONE, None)
    store.add(Heals(identity=rank.identity, rows=(done,) * (HEALS_KEPT + 3)))
    assert [event.number for event in store.after(HEALS_KEPT + 1)] == [HEALS_KEPT + 2, HEALS_KEPT + 3]
    assert len(store.after(0)) == HEALS_KEPT


def test_on_a_panel_and_in_an_alert() -> None:
    """By action and outcome, whatever these are."""
    board = json.loads((ROOT / "dashboards/generated/kv-canary-incident.json").read_text())
    shown = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    (expression,) = (one for one in shown if "kv_canary_heals_total" in one)
    assert "sum by (action, outcome)" in expression
    assert int(expression.removeprefix("topk(").partition(",")[0]) >= len(HealAction) * len(HealOutcome)
    rules = yaml.safe_load((ROOT / "alerts/rules/debt.yml").read_text())["groups"]
    (rule,) = (rule for group in rules for rule in group["rules"] if rule.get("alert") == "KVCanaryHealed")
    assert "kv_canary_heals_total unless" in rule["expr"]
    assert {"action", "outcome"} <= set(re.findall(r"labels\.(\w+)", rule["annotations"]["summary"]))
