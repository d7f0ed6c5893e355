"""The demo with a real Prometheus, Alertmanager and webhook: from a fault to the page and its resolution.

The tests of this module run in order on one stack: without a fault, with one, after the acknowledgement.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from urllib.parse import parse_qs, urlsplit

import pytest

from alerts.links import RUNBOOK_BASE
from alerts.render import RUNBOOKS
from dashboards.build import GENERATED, annotation_expressions
from tests.e2e.conftest import System
from tests.ops.expressions import alert_expressions, panel_queries, panels_of, substituted
from tests.ops.monitoring_stack import MonitoringStack
from tests.telemetry.receiver import Item, Receiver, open_server

pytestmark = [pytest.mark.ops, pytest.mark.timeout(300)]

PAGE_SECONDS = 10.0
SICK = {"instance": "sick"}
ID = "kv_canary.incident.id"
EXPECTED_QUIET = {"KVCanaryWatchdog"}
EXPECTED_SICK = EXPECTED_QUIET | {"KVCanaryDamage", "KVCanaryPerturbationActive"}


@pytest.fixture(scope="module")
def otlp() -> Iterator[tuple[Receiver, str]]:
    """A receiver of spans, and its address."""
    receiver = Receiver()
    server = open_server(receiver, "grpc")
    yield receiver, server.url
    server.close()


def test_a_healthy_engine_raises_no_alert(
    system: System, stack: MonitoringStack, otlp: tuple[Receiver, str]
) -> None:
    system.serve(
        OTEL_EXPORTER_OTLP_ENDPOINT=otlp[1], OTEL_EXPORTER_OTLP_PROTOCOL="grpc",
        OTEL_BSP_SCHEDULE_DELAY="100",
    )  # fmt: skip
    system.start("demo", "--shape", "tiny", "--endpoint", system.endpoint, KV_CANARY_INSTANCE="healthy")
    system.until(lambda: system.state() == "ok")
    system.until(stack.ready)
    system.request("POST", "/canary/sweep?wait=true")
    system.until(lambda: bool(stack.query("rank:kv_canary_overhead:ratio5m > 0")))
    system.until(lambda: bool(stack.query("rank:kv_canary_sweep_age:seconds")))
    assert stack.firing() == EXPECTED_QUIET, system.get("/canary/status").body
    assert {call.path for call in stack.pager.calls} <= {"/watchdog"}


def test_every_panel_and_alert_can_be_queried_without_a_fault(stack: MonitoringStack) -> None:
    check_queries(stack, with_fault=False)


def test_an_injected_fault_pages_within_ten_seconds(system: System, stack: MonitoringStack, capsys) -> None:
    # Exactly one fault, so that the alert stays resolved once acknowledged. It may happen before Prometheus
    # has scraped the rank: the ticket must fire even then.
    system.start(
        "demo", "--shape", "tiny", "--endpoint", system.endpoint, "--perturb", "real_kv_used=1",
        KV_CANARY_INSTANCE="sick", KV_CANARY_PERTURB_LIMIT="1", KV_CANARY_PERTURB_WARMUP="200",
    )  # fmt: skip
    system.until(lambda: stack.pager.find("/page", "firing", alertname="KVCanaryDamage", **SICK) is not None)
    page = stack.pager.find("/page", "firing", alertname="KVCanaryDamage", **SICK)
    assert page is not None
    events = system.get("/canary/violations?limit=500&instance=sick").json["violations"]
    seen = min(event["violation"]["time_ns"] for event in events) / 1e9
    latency = system.metric("kv_canary_detection_latency_seconds_sum", instance="sick")
    assert system.metric("kv_canary_perturbations_total", outcome="detected", **SICK) == 1
    assert latency is not None
    injected = seen - latency
    to_page = page.received - injected
    with capsys.disabled():
        print(f"\nfault to violation {latency:.3f} s, fault to page {to_page:.2f} s")
    assert 0 < to_page < PAGE_SECONDS
    assert page.alert["labels"]["severity"] == "page"
    row = events[-1]["violation"]
    assert page.alert["labels"]["service_address"] == f"127.0.0.1:{system.port}"
    assert page.alert["annotations"]["summary"] == (
        f"KV cache corruption on reference/sick rank 0: {row['reason']} in {row['group']} slot {row['slot']}"
        + (f", position {row['position']}" if row["position"] is not None else "")
        + (f", request {row['request']}" if row["request"] else "")
        + f", found by the {row['phase']} check"
    )
    assert stack.pager.find("/page", "firing", instance="healthy") is None


def test_the_page_leads_to_the_incident_the_dashboard_and_the_runbook(
    system: System, stack: MonitoringStack
) -> None:
    """From the webhook's JSON by its links only."""
    page = stack.pager.find("/page", "firing", alertname="KVCanaryDamage", **SICK)
    assert page is not None
    links = page.alert["annotations"]
    assert links["service_url"] == f"http://127.0.0.1:{system.port}"
    answer = system.get(links["incident_url"].removeprefix(links["service_url"]))
    assert (answer.status, answer.content_type.partition(";")[0]) == (200, "text/html"), links
    bundle = system.get(f"/canary/incidents/{links['incident_url'].rpartition('/')[2]}")
    assert bundle.status == 200, (links, bundle.body)
    assert (bundle.json["incident"]["instance"], bundle.json["incident"]["id"]) == ("sick", links["incident"])

    board = urlsplit(links["dashboard_url"])
    content = json.loads((GENERATED / f"{board.path.removeprefix('/d/')}.json").read_text("utf-8"))
    chosen = {name: value for name, (value,) in parse_qs(board.query).items() if name.startswith("var-")}
    assert chosen == {"var-cluster": "demo", "var-instance": "sick", "var-rank": "0"}
    assert {f"var-{each['name']}" for each in content["templating"]["list"]} > chosen.keys()
    (panel,) = [each for each in panels_of(content) if each["title"] == "Open incidents"]
    (row,) = stack.query(substituted(panel["targets"][0]["expr"], chosen["var-instance"]))
    urls = {link["title"]: link["url"] for link in panel["fieldConfig"]["defaults"]["links"]}
    for label, value in row["metric"].items():
        urls = {title: url.replace(f"${{__data.fields.{label}}}", value) for title, url in urls.items()}
    assert urls["This incident"] == links["incident_url"]
    assert urls["Runbook"] == links["runbook_url"]
    assert row["metric"]["trace_id"] in urls["Its trace"]

    runbook = links["runbook_url"].removeprefix(RUNBOOK_BASE + "/")
    assert (RUNBOOKS / runbook).read_text("utf-8").startswith("# KVCanaryDamage\n")


def test_every_panel_and_alert_can_be_queried_with_a_fault(system: System, stack: MonitoringStack) -> None:
    # Prometheus staggers rule groups within an interval: the page may fire before the ticket.
    system.until(lambda: stack.firing() >= EXPECTED_SICK)
    check_queries(stack, with_fault=True)
    assert stack.query('sum(kv_canary_violations_total{instance="sick"}) > 0')
    # The fault may precede the first scrape of its rank; the panel must count it nevertheless.
    (shown,) = [query for query in panel_queries() if query.where.endswith(": Violations in range")]
    assert stack.query(f"{shown.expression} == sum(kv_canary_violations_total)")


def test_exemplars_come_back_with_the_incident(system: System, stack: MonitoringStack) -> None:
    def exemplars() -> list[dict[str, str]]:
        now = stack.get("query", query="time()")["result"][0]
        found = stack.get(
            "query_exemplars", query="kv_canary_violations_total", start=str(now - 600), end=str(now)
        )
        return [exemplar["labels"] for series in found for exemplar in series["exemplars"]]

    system.until(lambda: bool(exemplars()))
    page = stack.pager.find("/page", "firing", alertname="KVCanaryDamage", **SICK)
    assert page is not None
    assert {labels["incident_id"] for labels in exemplars()} == {page.alert["annotations"]["incident"]}


def test_the_page_resolves_after_the_acknowledgement(system: System, stack: MonitoringStack) -> None:
    system.until(lambda: system.request("POST", "/canary/acknowledge").status == 202)
    system.until(
        lambda: stack.pager.find("/page", "resolved", alertname="KVCanaryDamage", **SICK) is not None
    )
    assert not stack.query('kv_canary_state{state="violated",instance="sick"} == 1')


def test_one_flipped_bit_is_one_story(
    system: System, stack: MonitoringStack, otlp: tuple[Receiver, str]
) -> None:
    """From the byte to the resolved page: each of them once, and all name the same incident."""
    answer = system.get("/canary/violations?limit=500&instance=sick").json
    (event,) = answer["violations"]
    assert system.metric("kv_canary_violations_total", **SICK) == 1
    log = (system.folder / "2.log").read_text()
    named = [line for line in log.splitlines() if "KV cache violation: " in line]
    assert len(named) == 1, log
    assert f"slot={event['violation']['slot']}, " in named[0]
    incidents = [
        each for each in system.get("/canary/incidents").json["incidents"] if each["instance"] == "sick"
    ]
    (incident,) = incidents
    assert incident["id"] == event["incident"]
    assert named[0].endswith(f", incident={incident['id']}")
    pages = {
        (call.alert["fingerprint"], call.alert["startsAt"])
        for call in stack.pager.calls
        if call.path == "/page" and call.alert["labels"]["alertname"] == "KVCanaryDamage"
    }
    assert len(pages) == 1
    bundle = system.get(f"/canary/incidents/{incident['id']}").json
    assert [row["violation"]["slot"] for row in bundle["incident"]["first"]] == [event["violation"]["slot"]]

    def tree() -> list[Item]:
        roots = [
            each for each in otlp[0].named("kv_canary.incident") if each.attributes[ID] == incident["id"]
        ]
        return [each for root in roots for each in otlp[0].spans if each.body.trace_id == root.body.trace_id]

    # Its last span leaves when the page is resolved.
    system.until(lambda: "kv_canary.incident.end" in [each.body.name for each in tree()])
    assert [each.body.name for each in tree() if not each.body.parent_span_id] == ["kv_canary.incident"]


def test_a_killed_engine_pages_as_blind(system: System, stack: MonitoringStack) -> None:
    system.processes[-1].kill()
    system.processes[-1].wait()
    stale = {"alertname": "KVCanarySnapshotStale"} | SICK
    system.until(lambda: stack.pager.find("/page", "firing", **stale) is not None)
    # The catch-all fires too and is muted by the alert with the cause.
    system.until(lambda: stack.muted(alertname="KVCanaryBlind", **SICK))
    assert stack.pager.find("/page", "firing", alertname="KVCanaryBlind") is None
    system.request("POST", "/canary/acknowledge")
    system.until(lambda: stack.pager.find("/page", "resolved", **stale) is not None)


def test_the_watchdog_fires(system: System, stack: MonitoringStack) -> None:
    # Last, as an alert that fires before Prometheus knows its Alertmanager is sent again after a minute.
    system.until(lambda: stack.pager.find("/watchdog", "firing", alertname="KVCanaryWatchdog") is not None)


def check_queries(stack: MonitoringStack, *, with_fault: bool) -> None:
    """Run every query; one without data must be declared as empty in this situation."""
    unexplained = [
        f"{query.where}: {query.expression}"
        for query in panel_queries()
        if not query.may_be_empty(with_fault) and not stack.query(query.expression)
    ]
    assert not unexplained, "\n".join(unexplained)
    for expression in annotation_expressions().values():
        stack.query(substituted(expression))
    firing = {name for name, expression in alert_expressions() if stack.query(expression)}
    firing.discard("KVCanaryOverheadHigh")  # a tiny engine on a busy CPU; it would take ten minutes to fire
    assert firing == (EXPECTED_SICK if with_fault else EXPECTED_QUIET)
