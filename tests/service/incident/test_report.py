"""The incident page's data: causes, timeline, damage map, slots, and what is not known."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from canary_obs.hub.hub import Hub
from canary_obs.injection_counts import PerturbCount
from canary_obs.records import SweepReport
from canary_obs.service.incident.causes import likely_causes
from canary_obs.service.incident.report import build_report
from canary_obs.vocabulary import Part, PerturbMode, Phase, Reason, SweepStatus
from tests.fault_cases.classes import FILE, text
from tests.service.conftest import check_problem
from tests.service.fakes import progress, snapshot
from tests.service.incident.harness import (
    SLOT,
    STEP,
    WHO,
    changed,
    evidence,
    facts,
    hub_with,
    incident_of,
    row,
    written,
)  # fmt: skip

DAMAGED = facts(position=158, found={Part.K: "0x2"})
FLIP = row(Reason.KV_DATA, part=Part.K)


def report_of(*rows, seen=(), hub=None):
    hub = Hub() if hub is None else hub
    return build_report(hub, hub_with(hub, *rows, seen=seen).id)


def moments(report):
    return {moment.what: moment for moment in report.timeline}


def test_the_classes_are_those_of_the_fault_cases():
    assert FILE.read_text("utf-8") == text(), "run: python -m tests.fault_cases.classes"


@pytest.mark.parametrize(("current", "first"), [("0x1", "bit flip"), ("0x7", None)])
def test_one_bit_is_a_bit_flip_first_and_more_is_none(current, first):
    seen = evidence(slot=DAMAGED, changed=(changed("0x0", current),))
    titles = [cause.title for cause in likely_causes(incident_of(FLIP, seen=(seen,)))]
    assert (titles[0] == "bit flip") is (first is not None)
    assert ("bit flip" in titles) is (first is not None)


def test_the_class_with_the_same_first_signals_is_marked():
    head = [row(reason, phase=Phase.HEAD) for reason in (Reason.POSITION, Reason.TOKEN)]
    rows = head + [row(reason) for reason in (Reason.CHAIN, Reason.POSITION)]
    causes = likely_causes(incident_of(*rows))
    assert (causes[0].title, causes[0].exact) == ("cross-request row mix-up", True)
    assert not any(cause.exact for cause in causes[1:])


def test_the_timeline_says_what_is_known():
    hub = Hub()
    passed = progress("good", SweepStatus.PASSED, started_ns=1_000_000_000, seconds=1.0, step=40)
    seen = evidence(slot=DAMAGED, history=(written(30, "r5"),))
    hub_with(hub, FLIP, seen=(seen,))
    hub.ingest(SweepReport(identity=WHO, progress=passed), lambda command: None)
    found = moments(build_report(hub, hub.incidents.newest_first()[0].id))
    assert (found["written"].step, found["last good check"].step) == (30, 40)
    assert found["last good check"].time_ns == 2_000_000_000
    assert found["damage"].text == f"between the sweep in step 40 and step {STEP}"
    assert found["detection"].step == STEP
    assert found["acknowledged"].text == "not yet"


@pytest.mark.parametrize(
    "changes",
    [{"groups": ("swa",)}, {"data": False}, {"step": STEP + 1}, {"status": SweepStatus.VIOLATED}],
    ids=str,
)
def test_a_sweep_that_proves_nothing_is_no_last_good_check(changes):
    hub = Hub()
    hub_with(hub, FLIP)
    status = changes.pop("status", SweepStatus.PASSED)
    sweep = progress("other", status, started_ns=1, seconds=1.0, **{"step": 40} | changes)
    hub.ingest(SweepReport(identity=WHO, progress=sweep), lambda command: None)
    found = moments(build_report(hub, hub.incidents.newest_first()[0].id))
    assert (found["last good check"].time_ns, found["written"].step) == (None, None)
    assert found["damage"].text == f"not later than step {STEP}"


def test_an_acknowledgement_is_on_the_timeline(client, hub):
    incident = hub_with(hub, FLIP)
    client.post("/canary/acknowledge", json={"incident": incident.id, "by": "ann", "comment": "seen"})
    report = client.get(f"/console/incidents/{incident.id}").json()
    assert report["timeline"][-1]["text"] == "by ann: seen"


def test_the_damage_map_has_the_changed_words_and_says_where_it_has_none():
    words = (changed("0x0", "0x1"), changed("0x0", "0x3", layer=0, head=1, part=Part.V))
    report = report_of(FLIP, seen=(evidence(slot=DAMAGED, changed=words),))
    found = [(w.layer, w.head, w.part, w.bits, w.slot) for w in report.damage.words]
    assert found == [(1, 0, Part.K, 1, SLOT), (0, 1, Part.V, 2, SLOT)]
    assert (report.damage.layers, report.damage.unexplained) == (2, ())
    assert report_of(FLIP, seen=(evidence(slot=DAMAGED),)).damage.unexplained == (SLOT,)
    assert report_of(FLIP).damage.words == ()


def test_slots_and_requests_are_those_of_the_evidence():
    near = (facts(SLOT + 1), facts(SLOT - 1, state=None))
    report = report_of(FLIP, seen=(evidence(slot=DAMAGED, neighbours=near),))
    (place,) = report.neighbourhoods
    assert [(slot.slot, slot.found) for slot in place.slots] == [(1025, False), (1026, True), (1027, False)]
    assert report.requests == ("r000002", "r000005")
    assert report_of(row(Reason.RECORD, request=None)).requests == ()


def test_planted_faults_are_announced_only_where_they_are_injected():
    assert report_of(FLIP).injected is None
    hub = Hub()
    hub_with(hub, FLIP)
    counts = {PerturbMode.REAL_KV_USED: PerturbCount(injected=3)}
    hub.ingest(snapshot(WHO, 1, perturbations=counts), lambda command: None)
    report = build_report(hub, hub.incidents.newest_first()[0].id)
    assert "rank 0 has injected 3" in report.injected


def test_an_unknown_incident_is_404(client):
    check_problem(client.get("/console/incidents/none"), 404, "no-such-incident")


def test_the_overview_and_the_page_say_the_same(client, hub):
    incident = hub_with(hub, row(Reason.POSITION, expected="0x9e", actual="0x79"), seen=(evidence(),))
    fleet = client.get("/console/fleet").json()
    page = client.get(f"/console/incidents/{incident.id}").json()
    assert fleet["incidents"][0]["sentence"] == page["sentence"]
    assert "of r000005: another request's context." in page["sentence"]
    assert msgspec.json.decode(client.get(f"/canary/incidents/{incident.id}").content)["incident"]


def test_the_runbook_of_its_alert_is_linked_where_there_is_one():
    hub = Hub()
    incident = hub_with(hub, FLIP, seen=()).id
    alert = (Path(__file__).parents[3] / "alerts/runbooks/KVCanaryDamage.md").read_text("utf-8")
    assert alert.startswith("# KVCanaryDamage")
    assert (
        build_report(hub, incident, "https://wiki.example/kv/").runbook
        == "https://wiki.example/kv/KVCanaryDamage.md"
    )
    assert build_report(hub, incident).runbook is None
