"""Every alert has thresholds with reasons, unit tests for every situation, and a runbook."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
import yaml

from alerts.render import RULES, RUNBOOKS, TEMPLATES, thresholds
from alerts.tests.build import FILES, HERE as TESTS, WATCHDOG, alerts
from alerts.tests.scenarios import BLIND, DAMAGE, DEBT
from canary_obs.telemetry.catalog import MetricType, all_metrics
from dashboards.build import variable_queries
from tests.ops.expressions import alert_expressions, panel_queries, recorded_series
from tests.ops.tools import ROOT, judge

SITUATIONS = ("quiet, firing, resolved", "target gone", "engine restarts, counters start again")
SECTIONS = ["## Meaning", "## Impact", "## Diagnosis", "## Mitigation", "## Commands", "## Escalation"]
BY_WEEK = {"KVCanarySuspectGPU", "KVCanarySuspectRelease"}  # tests/fleet tries these over weeks
SCENARIOS = {scenario.alert: scenario for scenario in (*DAMAGE, *BLIND, *DEBT)}
ALERTS = alerts()
_METRIC = re.compile(r"\b(?:(?:rank|engine|gpu|release):)?kv_canary_\w+(?::\w+)?")


@cache
def unit_tests() -> list[dict[str, Any]]:
    """Promtool's, of all files; reading them takes a second."""
    files = [yaml.safe_load(path.read_text("utf-8")) for path in TESTS.glob("*.yml")]
    return [test for file in files for test in file["tests"]]


def test_promtool_accepts_the_rules() -> None:
    judge("promtool", "check", "rules", *sorted(RULES.glob("*.yml")), package="prometheus")


@pytest.mark.ops
@pytest.mark.timeout(960)
@pytest.mark.parametrize("kind", FILES)
def test_the_unit_tests_pass(kind: str) -> None:
    judge("promtool", "test", "rules", f"{kind}.yml", cwd=TESTS, package="prometheus")


@pytest.mark.ops
def test_a_wrong_threshold_fails_the_unit_tests(tmp_path) -> None:
    """A defect in one rule makes its unit test fail."""
    for folder in ("rules", "tests"):
        (tmp_path / folder).mkdir()
    for path in RULES.glob("*.yml"):
        text = path.read_text("utf-8").replace('state="violated"}) == 1', 'state="violated"}) == 2')
        (tmp_path / "rules" / path.name).write_text(text)
    (tmp_path / "tests" / "damage.yml").write_text((TESTS / "damage.yml").read_text())
    with pytest.raises(AssertionError, match="KVCanaryDamage: quiet, firing, resolved"):
        judge("promtool", "test", "rules", "damage.yml", cwd=tmp_path / "tests", package="prometheus")


def test_every_alert_is_tried_in_every_situation() -> None:
    assert set(SCENARIOS) | {WATCHDOG} | BY_WEEK == set(ALERTS)
    names = {test["name"] for test in unit_tests()}
    for name, scenario in SCENARIOS.items():
        for situation in SITUATIONS:
            # What fires when its target goes has that situation as its firing one.
            if situation != "target gone" or not scenario.outlives_its_target:
                assert f"{name}: {situation}" in names


@pytest.mark.parametrize("name", sorted(ALERTS))
def test_every_alert_has_labels_text_and_a_runbook(name: str) -> None:
    rule = ALERTS[name]
    assert rule["labels"]["severity"] in ("page", "ticket", "none")
    assert rule["labels"]["kind"] in ("damage", "blind", "debt", "watchdog")
    assert {"summary", "description", "runbook_url", "dashboard_url"} <= rule["annotations"].keys()
    about_no_series = {"KVCanaryTargetAbsent", WATCHDOG}
    assert ("service_url" in rule["annotations"]) == (name not in about_no_series)
    assert ("incident_url" in rule["annotations"]) == (rule["labels"]["kind"] == "damage")
    text = (RUNBOOKS / f"{name}.md").read_text("utf-8")
    assert [line for line in text.splitlines() if line.startswith("## ")] == SECTIONS
    assert text.startswith(f"# {name}\n")


def test_no_runbook_is_left_over() -> None:
    assert {path.stem for path in RUNBOOKS.glob("*.md")} == set(ALERTS)


@pytest.mark.parametrize(
    ("input_of_ok", "alert"),
    [
        ("kernels", "KVCanaryKernelStalled"),
        ("kernels", "KVCanaryChecksNotRunning"),
        ("coverage", "KVCanaryCoverageLow"),
        ("sweep age", "KVCanarySweepOverdue"),
        ("patrol age", "KVCanaryPatrolOverdue"),
        ("drops", "KVCanaryEvidenceDropped"),
        ("snapshot age", "KVCanarySnapshotStale"),
        ("observer faults", "KVCanaryObserverFault"),
        ("pipeline lag", "KVCanaryPipelineStale"),
        ("pause", "KVCanaryPaused"),
    ],
)
def test_every_input_of_state_ok_has_an_alert_that_fires_in_a_unit_test(input_of_ok: str, alert: str) -> None:
    checks = [check for test in unit_tests() for check in test["alert_rule_test"]]
    assert any(check["exp_alerts"] for check in checks if check["alertname"] == alert), input_of_ok


def test_every_threshold_has_a_reason_and_a_use() -> None:
    templates = "".join(path.read_text("utf-8") for path in TEMPLATES.glob("*.yml"))
    for name, entry in thresholds().items():
        assert set(entry) == {"value", "reason"}, name
        assert len(str(entry["reason"])) > 20, name
        assert f"<<{name}>>" in templates, f"{name} is not used"


def test_rules_and_panels_read_only_what_is_exposed() -> None:
    exposed = set(recorded_series()) | {metric.name for metric in all_metrics()}
    for metric in all_metrics():
        if metric.type is MetricType.HISTOGRAM:
            exposed |= {metric.name + suffix for suffix in ("_bucket", "_sum", "_count")}
    expressions = dict(alert_expressions()) | recorded_series()
    expressions |= {query.where: query.expression for query in panel_queries()}
    for where, expression in expressions.items():
        assert set(_METRIC.findall(expression)) <= exposed, where


def test_every_rank_metric_is_on_a_panel_or_in_a_rule() -> None:
    everything = "".join([*recorded_series().values(), *(q.expression for q in panel_queries())])
    everything += "".join(variable_queries().values())
    unused = [metric.name for metric in all_metrics() if not re.search(rf"\b{metric.name}", everything)]
    assert unused == [], "metrics without a panel: add them to a dashboard"


def test_the_configurations_are_accepted(tmp_path) -> None:
    judge("promtool", "check", "config", _prometheus_folder(tmp_path), package="prometheus")
    judge(
        "amtool",
        "check-config",
        ROOT / "docker/alertmanager/alertmanager.yml",
        package="prometheus-alertmanager",
    )


def _prometheus_folder(folder):
    for path in (ROOT / "docker/prometheus").rglob("*"):
        if path.is_file():
            target = folder / path.relative_to(ROOT / "docker/prometheus")
            target.parent.mkdir(exist_ok=True)
            target.write_text(path.read_text())
    (folder / "rules").mkdir()
    for path in RULES.glob("*.yml"):
        (folder / "rules" / path.name).write_text(path.read_text())
    return folder / "prometheus.yml"


@pytest.mark.parametrize(
    ("labels", "receiver"),
    [
        ("severity=page kind=damage alertname=KVCanaryDamage", "pager"),
        ("severity=page kind=blind alertname=KVCanaryBlind", "pager"),
        ("severity=ticket kind=debt alertname=KVCanaryPaused", "tickets"),
        ("severity=none kind=watchdog alertname=KVCanaryWatchdog", "watchdog"),
    ],
)
def test_alerts_are_routed(labels: str, receiver: str) -> None:
    config = ROOT / "docker/alertmanager/alertmanager.yml"
    arguments = ("config", "routes", "test", f"--config.file={config}", f"--verify.receivers={receiver}")
    judge("amtool", *arguments, *labels.split(), package="prometheus-alertmanager")
