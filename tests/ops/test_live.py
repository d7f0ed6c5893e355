"""A real demo, a real Prometheus, a real Alertmanager, a real webhook: from the fault to the page and back.

The tests of this module run in order on one station: without a fault, with one, after the acknowledgement.
"""

from __future__ import annotations

import pytest

from dashboards.build import annotation_expressions
from tests.e2e.conftest import House
from tests.ops.expressions import alert_expressions, panel_queries, substituted
from tests.ops.station import Station

pytestmark = [pytest.mark.ops, pytest.mark.timeout(300)]

PAGE_SECONDS = 10.0
SICK = {"instance": "sick"}
EXPECTED_QUIET = {"KVCanaryWatchdog"}
EXPECTED_SICK = EXPECTED_QUIET | {"KVCanaryDamage", "KVCanaryPerturbationActive"}


def test_a_healthy_engine_pages_nobody(house: House, station: Station) -> None:
    house.serve()
    house.start("demo", "--shape", "tiny", "--endpoint", house.endpoint, KV_CANARY_INSTANCE="well")
    house.until(lambda: house.state() == "ok")
    house.until(station.ready)
    house.request("POST", "/canary/sweep?wait=true")
    house.until(lambda: bool(station.query("rank:kv_canary_overhead:ratio5m > 0")))
    house.until(lambda: bool(station.query("rank:kv_canary_sweep_age:seconds")))
    assert station.firing() == EXPECTED_QUIET, house.get("/canary/status").body
    assert {call.path for call in station.pager.calls} <= {"/watchdog"}


def test_every_panel_and_alert_can_be_asked_without_a_fault(station: Station) -> None:
    check_queries(station, with_fault=False)


def test_a_planted_fault_pages_within_ten_seconds(house: House, station: Station, capsys) -> None:
    # Exactly one fault, so that the page can be acknowledged for good. It may come before Prometheus has seen
    # the rank: the ticket must fire even so.
    house.start(
        "demo", "--shape", "tiny", "--endpoint", house.endpoint, "--perturb", "real_kv_used=1",
        KV_CANARY_INSTANCE="sick", KV_CANARY_PERTURB_LIMIT="1", KV_CANARY_PERTURB_WARMUP="200",
    )  # fmt: skip
    house.until(lambda: station.pager.find("/page", "firing", alertname="KVCanaryDamage", **SICK) is not None)
    page = station.pager.find("/page", "firing", alertname="KVCanaryDamage", **SICK)
    assert page is not None
    events = house.get("/canary/violations?limit=500&instance=sick").json["violations"]
    seen = min(event["violation"]["time_ns"] for event in events) / 1e9
    latency = house.metric("kv_canary_detection_latency_seconds_sum", instance="sick")
    assert house.metric("kv_canary_perturbations_total", outcome="detected", **SICK) == 1
    assert latency is not None
    planted = seen - latency
    to_page = page.received - planted
    with capsys.disabled():
        print(f"\nfault to violation {latency:.3f} s, fault to page {to_page:.2f} s")
    assert 0 < to_page < PAGE_SECONDS
    assert page.alert["labels"]["severity"] == "page"
    assert page.alert["annotations"]["runbook_url"].endswith("/KVCanaryDamage.md")
    assert station.pager.find("/page", "firing", instance="well") is None


def test_the_incident_of_the_page_opens_the_bundle(house: House, station: Station) -> None:
    page = station.pager.find("/page", "firing", alertname="KVCanaryDamage", **SICK)
    assert page is not None
    incident = page.alert["annotations"]["incident"]
    bundle = house.get(f"/canary/incidents/{incident}")
    assert bundle.status == 200, (incident, bundle.body)
    assert bundle.json["incident"]["instance"] == "sick"


def test_every_panel_and_alert_can_be_asked_with_a_fault(house: House, station: Station) -> None:
    # Prometheus spreads the groups of rules over each interval: the page may come before the ticket fires.
    house.until(lambda: station.firing() >= EXPECTED_SICK)
    check_queries(station, with_fault=True)
    assert station.query('sum(kv_canary_violations_total{instance="sick"}) > 0')
    # The fault may be older than the first scrape of its rank: the panel counts it even so.
    (shown,) = [query for query in panel_queries() if query.where.endswith(": Violations in range")]
    assert station.query(f"{shown.expression} == sum(kv_canary_violations_total)")


def test_exemplars_come_back_with_the_incident(house: House, station: Station) -> None:
    def exemplars() -> list[dict[str, str]]:
        now = station.get("query", query="time()")["result"][0]
        found = station.get(
            "query_exemplars", query="kv_canary_violations_total", start=str(now - 600), end=str(now)
        )
        return [exemplar["labels"] for series in found for exemplar in series["exemplars"]]

    house.until(lambda: bool(exemplars()))
    page = station.pager.find("/page", "firing", alertname="KVCanaryDamage", **SICK)
    assert page is not None
    assert {labels["incident_id"] for labels in exemplars()} == {page.alert["annotations"]["incident"]}


def test_the_page_resolves_after_the_acknowledgement(house: House, station: Station) -> None:
    house.until(lambda: house.request("POST", "/canary/acknowledge").status == 202)
    house.until(
        lambda: station.pager.find("/page", "resolved", alertname="KVCanaryDamage", **SICK) is not None
    )
    assert not station.query('kv_canary_state{state="violated",instance="sick"} == 1')


def test_a_killed_engine_pages_as_blind(house: House, station: Station) -> None:
    house.processes[-1].kill()
    house.processes[-1].wait()
    stale = {"alertname": "KVCanarySnapshotStale"} | SICK
    house.until(lambda: station.pager.find("/page", "firing", **stale) is not None)
    # The catch-all fires as well and is muted by the one that names the cause.
    house.until(lambda: station.muted(alertname="KVCanaryBlind", **SICK))
    assert station.pager.find("/page", "firing", alertname="KVCanaryBlind") is None
    house.request("POST", "/canary/acknowledge")
    house.until(lambda: station.pager.find("/page", "resolved", **stale) is not None)


def test_the_watchdog_barks(house: House, station: Station) -> None:
    # Last: what fires before Prometheus has found its Alertmanager is sent again after a minute.
    house.until(lambda: station.pager.find("/watchdog", "firing", alertname="KVCanaryWatchdog") is not None)


def check_queries(station: Station, *, with_fault: bool) -> None:
    """Every expression is answered; one without data is empty by design in this situation."""
    unexplained = [
        f"{query.where}: {query.expression}"
        for query in panel_queries()
        if not query.may_be_empty(with_fault) and not station.query(query.expression)
    ]
    assert not unexplained, "\n".join(unexplained)
    for expression in annotation_expressions().values():
        station.query(substituted(expression))
    firing = {name for name, expression in alert_expressions() if station.query(expression)}
    firing.discard("KVCanaryOverheadHigh")  # a tiny engine on a busy CPU; it would take ten minutes to fire
    assert firing == (EXPECTED_SICK if with_fault else EXPECTED_QUIET)
