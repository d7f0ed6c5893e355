"""The pod of the Kustomize base: hardened, wired to what is really there, and out of its engine's way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import canary_obs
from canary_obs.engines.vllm.versions import V1_VERSIONS
from dashboards.manifests import BASE, CHART
from tests.ops.chart import of_kind
from tests.ops.tools import ROOT, judge

GOLDEN = ROOT / "tests/golden"


@pytest.fixture(scope="module")
def found() -> list:
    files = yaml.safe_load((BASE / "kustomization.yaml").read_text("utf-8"))["resources"]
    documents = [each for name in files for each in yaml.safe_load_all((BASE / name).read_text("utf-8"))]
    return [each for each in documents if each is not None]


@pytest.fixture(scope="module")
def template(found: list) -> dict[str, Any]:
    return of_kind(found, "Deployment")["spec"]["template"]


def containers(template: dict[str, Any]) -> dict[str, dict[str, Any]]:
    spec = template["spec"]
    return {each["name"]: each for each in (*spec["initContainers"], *spec["containers"])}


def selects(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return selector.items() <= labels.items()


def test_the_chart_is_of_this_release() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text("utf-8"))
    assert chart["appVersion"] == canary_obs.__version__
    values = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
    version = values["engine"]["image"].rpartition(":v")[2]
    assert version.rpartition(".")[0] in V1_VERSIONS, "an engine that the canary is known to attach to"


def test_each_container_is_hardened(template: dict[str, Any]) -> None:
    pod = template["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    assert set(containers(template)) == {"install-canary", "engine", "kv-canary"}
    for container in containers(template).values():
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"] is True
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert "memory" in container["resources"]["limits"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes


def test_engine_and_service_meet_at_one_socket(template: dict[str, Any]) -> None:
    found = containers(template)
    ends = [
        {each["name"]: each.get("value") for each in found[name]["env"]} for name in ("engine", "kv-canary")
    ]
    assert len({end["KV_CANARY_ENDPOINT"] for end in ends}) == 1
    path = Path(ends[0]["KV_CANARY_ENDPOINT"].removeprefix("ipc://"))
    for name in ("engine", "kv-canary"):
        (mount,) = [each for each in found[name]["volumeMounts"] if each["name"] == "socket"]
        # A folder of its own below the mount: the service makes it, for its owner alone.
        assert path.parent.parent == Path(mount["mountPath"])
    (installed,) = [each for each in found["install-canary"]["volumeMounts"] if each["name"] == "plugin"]
    assert ends[0]["PYTHONPATH"] == installed["mountPath"] == found["install-canary"]["command"][-1]


def test_every_setting_exists(template: dict[str, Any]) -> None:
    golden = json.loads((GOLDEN / "settings.json").read_text("utf-8"))
    known = {f"KV_CANARY_{name.upper()}" for settings in golden.values() for name in settings}
    names = {each["name"] for container in containers(template).values() for each in container.get("env", ())}
    set_here = {name for name in names if name.startswith("KV_CANARY_")}
    assert set_here > {"KV_CANARY_MODE", "KV_CANARY_TOKENS_FILE"}
    assert set_here <= known


def test_no_variable_of_a_service_reaches_the_settings(template: dict[str, Any]) -> None:
    """Kubernetes sets KV_CANARY_PORT=tcp://... for a Service called kv-canary, unless it is told not to."""
    assert template["spec"]["enableServiceLinks"] is False


def test_probes_ask_what_answers_without_a_token(template: dict[str, Any]) -> None:
    paths = json.loads((GOLDEN / "openapi.json").read_text("utf-8"))["with tokens"]["paths"]
    service = containers(template)["kv-canary"]
    ports = {port["name"] for port in service["ports"]}
    probes = [service[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness")]
    assert [probe["path"] for probe in probes] == ["/readyz", "/healthz"]
    for probe in probes:
        assert paths[probe["path"]]["get"]["x-kv-canary-scope"] == "none"
        assert probe["port"] in ports


def test_the_canary_cannot_take_its_engine_out_of_service(template: dict[str, Any]) -> None:
    """A pod is ready when all its containers are: the service has no readiness to lose."""
    assert "readinessProbe" not in containers(template)["kv-canary"]
    assert "readinessProbe" in containers(template)["engine"]


def test_tokens_come_from_a_secret_of_yours_in_a_mode_that_the_service_takes(found, template) -> None:
    assert "Secret" not in {each["kind"] for each in found}
    service = containers(template)["kv-canary"]
    (tokens,) = [volume for volume in template["spec"]["volumes"] if volume["name"] == "tokens"]
    assert tokens["secret"]["defaultMode"] == 0o440
    (mount,) = [each for each in service["volumeMounts"] if each["name"] == "tokens"]
    assert "subPath" not in mount, "Kubernetes never renews a file that is mounted by subPath"
    file = next(each["value"] for each in service["env"] if each["name"] == "KV_CANARY_TOKENS_FILE")
    assert file == f"{mount['mountPath']}/{tokens['secret']['items'][0]['path']}"
    assert [name for name, each in containers(template).items() if mount in each["volumeMounts"]] == [
        "kv-canary"
    ]
    (endpoint,) = of_kind(found, "PodMonitor")["spec"]["podMetricsEndpoints"]
    assert endpoint["authorization"]["credentials"] == {
        "name": tokens["secret"]["secretName"],
        "key": "scrape-token",
    }


def test_only_prometheus_reaches_the_service(found: list, template: dict[str, Any]) -> None:
    policy, labels = of_kind(found, "NetworkPolicy")["spec"], template["metadata"]["labels"]
    assert selects(policy["podSelector"]["matchLabels"], labels)
    open_to_all = [rule["ports"] for rule in policy["ingress"] if "from" not in rule]
    assert open_to_all == [[{"port": "http", "protocol": "TCP"}]]
    (scraped,) = [rule for rule in policy["ingress"] if "from" in rule]
    assert [port["port"] for port in scraped["ports"]] == ["kv-canary"]
    assert set(scraped["from"][0]) == {"namespaceSelector", "podSelector"}, "both must hold"
    ports = {
        port["name"]: name for name, each in containers(template).items() for port in each.get("ports", ())
    }
    assert ports == {"http": "engine", "kv-canary": "kv-canary"}


def test_a_pod_that_a_runbook_isolates_is_served_no_more_and_still_watched(found, template) -> None:
    labels = template["metadata"]["labels"]
    isolated = labels.copy()
    del isolated["app.kubernetes.io/name"]  # alerts/runbooks/KVCanaryDamage.md
    deployment = of_kind(found, "Deployment")["spec"]["selector"]["matchLabels"]
    engine, canary = (each["spec"]["selector"] for each in found if each["kind"] == "Service")
    monitor = of_kind(found, "PodMonitor")["spec"]["selector"]["matchLabels"]
    policy = of_kind(found, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"]
    assert all(selects(each, labels) for each in (deployment, engine, canary, monitor, policy))
    assert not any(selects(each, isolated) for each in (deployment, engine))
    assert all(selects(each, isolated) for each in (canary, monitor, policy))


def test_scraped_series_have_the_labels_that_alerts_and_boards_ask_for(found: list) -> None:
    (endpoint,) = of_kind(found, "PodMonitor")["spec"]["podMetricsEndpoints"]
    assert endpoint["honorLabels"] is True
    relabelled = {each["targetLabel"]: each for each in endpoint["relabelings"]}
    assert relabelled["job"]["replacement"] == "kv-canary"
    assert relabelled["service_address"]["sourceLabels"] == ["__address__"]
    assert [each["targetLabel"] for each in endpoint["metricRelabelings"]] == ["cluster"]


def test_the_operators_rules_are_the_tested_ones(found: list, tmp_path: Path) -> None:
    groups = of_kind(found, "PrometheusRule")["spec"]["groups"]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": groups}))
    judged = judge("promtool", "check", "rules", tmp_path / "rules.yml", package="prometheus")
    rules = [rule for path in (ROOT / "alerts/rules").glob("*.yml") for rule in rules_of(path)]
    assert f"SUCCESS: {len(rules)} rules found" in judged
    by_text = sorted(json.dumps(rule) for group in groups for rule in group["rules"])
    assert by_text == sorted(map(json.dumps, rules))


def rules_of(path: Path) -> list:
    return [rule for group in yaml.safe_load(path.read_text("utf-8"))["groups"] for rule in group["rules"]]


def test_the_boards_are_those_of_the_release(found: list) -> None:
    maps = [each for each in found if each["kind"] == "ConfigMap"]
    boards = {
        path.name: path.read_text("utf-8").strip() for path in (ROOT / "dashboards/generated").glob("*")
    }
    assert {name: text for each in maps for name, text in each["data"].items()} == boards
    assert all(each["metadata"]["labels"]["grafana_dashboard"] == "1" for each in maps)
