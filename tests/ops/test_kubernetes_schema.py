"""Chart, base and overlay, rendered by Helm and Kustomize, keep Kubernetes' and the operator's schemas."""

from __future__ import annotations

import json
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from dashboards.manifests import BASE, CHART, KUBERNETES, chart_files
from tests.ops.chart import EVERYTHING, NOTHING, loaded_helm, objects
from tests.ops.tools import ROOT, judge

pytestmark = pytest.mark.ops
CRDS = Path(__file__).parent / "crd_schema"
OPERATOR = "monitoring.coreos.com/v1"
VALUES = {"nothing set": None, "everything": EVERYTHING, "as little as can be": NOTHING}
KUBERNETES_VERSIONS = ("1.27", "1.37")
APPLIED_BYTES = 262144  # of annotations; `kubectl apply` keeps the whole object in one


def judge_by_schema(found: list) -> None:
    for each in found:
        for version in KUBERNETES_VERSIONS if each["apiVersion"] != OPERATOR else ():
            kubernetes_validate.validate(each, version, strict=True)


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_helm_renders_keeps_the_schema(values: dict[str, Any] | None) -> None:
    found = objects(values)
    judge_by_schema(found)
    names = [(each["kind"], each["metadata"]["name"]) for each in found]
    assert len(names) == len(set(names))
    assert len(names) == (3 if values is NOTHING else 12)
    for each in found:
        assert len(json.dumps(each)) < APPLIED_BYTES, each["metadata"]["name"]


BROKEN = {
    "a template that does not exist": ("engine.yaml", 'include "canary.engine"', 'include "canary.motor"'),
    "a value that does not exist": ("engine.yaml", ".Values.engine.stopSeconds", ".Values.motor.stopSeconds"),
    "a block that is not closed": ("pod-monitor.yaml", "{{- end }}\nspec", "\nspec"),
    "a field that Kubernetes lacks": ("_engine.tpl", "containerPort:", "containerport:"),
    "a number that is none": ("_service.tpl", "periodSeconds: 2", "periodSeconds: soon"),
    "an indentation that is wrong": ("services.yaml", "nindent 4", "nindent 1"),
}


@pytest.mark.parametrize(("file", "good", "bad"), BROKEN.values(), ids=BROKEN)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_broken_template_is_noticed(file: str, good: str, bad: str, tmp_path: Path) -> None:
    shutil.copytree(CHART, tmp_path / "chart")
    template = tmp_path / "chart/templates" / file
    text = template.read_text("utf-8")
    assert good in text
    template.write_text(text.replace(good, bad, 1), "utf-8")
    objects()  # skips where there is no Helm, instead of passing
    with pytest.raises(Exception, match=r"(?i)render|yaml|template|valid|mapping|expected|property"):
        judge_by_schema(objects(chart=tmp_path / "chart"))


@pytest.mark.parametrize(
    "values",
    [
        {"engine": {"modle": "x"}},
        {"engine": {"model": ""}},
        {"canary": {"mode": "on"}},
        {"user": 0},
        {"prometheus": {"interval": "soon"}},
    ],
    ids=str,
)
def test_values_that_make_no_sense_are_refused(values: dict[str, Any]) -> None:
    helm = loaded_helm()
    with helm.Chart.load(CHART) as chart, pytest.raises(helm.HelmError, match="- at '/"):
        chart.validate_schema(values)


def test_helm_has_nothing_to_say() -> None:
    helm = loaded_helm()
    report = helm.lint(CHART, strict=True)
    found = [message for message in report["messages"] if "icon is recommended" not in message["error"]]
    assert (found, report["errors"]) == ([], [])


def test_the_chart_has_the_rules_and_boards_of_this_release() -> None:
    for path, text in chart_files().items():
        assert path.read_text("utf-8") == text, f"{path} is out of date: run make ops-files"


def kustomized(folder: Path) -> list:
    return list(yaml.safe_load_all(judge("kubectl", "kustomize", folder, package="kubernetes-client")))


def test_the_base_is_what_helm_renders() -> None:
    order = lambda each: (each["kind"], each["metadata"]["name"])  # noqa: E731
    assert sorted(kustomized(BASE), key=order) == sorted(objects(), key=order)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_overlay_puts_in_what_is_yours(tmp_path: Path) -> None:
    shutil.copytree(KUBERNETES / "base", tmp_path / "base")
    shutil.copytree(KUBERNETES / "overlay", tmp_path / "overlay")
    (tmp_path / "overlay/tokens.toml").write_text("[prometheus]\n")
    (tmp_path / "overlay/scrape-token").write_text("secret")
    found = kustomized(tmp_path / "overlay")
    judge_by_schema(found)
    assert {each["metadata"]["namespace"] for each in found} == {"llm"}
    by_kind = {each["kind"]: each for each in found}
    pod = by_kind["Deployment"]["spec"]["template"]["spec"]
    engine, service = pod["containers"]
    assert engine["args"][0] == "Qwen/Qwen3-8B"
    assert engine["args"][-1] == "--tensor-parallel-size=2"
    assert engine["resources"]["limits"]["nvidia.com/gpu"] == 2
    images = {service["image"], pod["initContainers"][0]["image"]}
    assert len(images) == 1
    assert images.pop().startswith("registry.example/")
    name = by_kind["Secret"]["metadata"]["name"]
    (volume,) = [volume for volume in pod["volumes"] if volume["name"] == "tokens"]
    (endpoint,) = by_kind["PodMonitor"]["spec"]["podMetricsEndpoints"]
    assert {volume["secret"]["secretName"], endpoint["authorization"]["credentials"]["name"]} == {name}
    assert {item["key"] for item in volume["secret"]["items"]} < set(by_kind["Secret"]["data"])
    assert endpoint["authorization"]["credentials"]["key"] in by_kind["Secret"]["data"]


def test_the_operators_schemas_accept_its_objects_and_can_refuse(tmp_path: Path) -> None:
    folder = tmp_path / "check"
    shutil.copytree(CRDS, folder)
    judge("npm", "ci", "--ignore-scripts", cwd=folder)
    found = [each for each in objects(EVERYTHING) if each["apiVersion"] == OPERATOR]
    assert {each["kind"] for each in found} == {"PodMonitor", "PrometheusRule"}

    def write_typed(each: dict[str, Any]) -> None:
        module = f"@kubernetes-models/prometheus-operator/{OPERATOR}"
        typed = f"import type {{ I{each['kind']} as Kind }} from '{module}';"
        (folder / f"{each['kind']}.ts").write_text(
            f"{typed}\nexport const found: Kind = {json.dumps(each)};\n"
        )

    def judge_values(each: dict[str, Any]) -> None:
        (folder / "objects.json").write_text(json.dumps([each]))
        judge("node", "check.js", "objects.json", cwd=folder)

    for each in found:
        write_typed(each)
        judge_values(each)
    judge("node", "node_modules/typescript/bin/tsc", "-p", ".", cwd=folder)
    (monitor,) = [each for each in found if each["kind"] == "PodMonitor"]
    endpoint = monitor["spec"]["podMetricsEndpoints"][0]
    endpoint["interval"] = "soon"
    with pytest.raises(AssertionError, match="interval"):
        judge_values(monitor)
    write_typed(monitor | {"spec": monitor["spec"] | {"podMetricsEndpoint": []}})
    with pytest.raises(AssertionError, match="podMetricsEndpoint"):
        judge("node", "node_modules/typescript/bin/tsc", "-p", ".", cwd=folder)


def test_the_release_installed_from_its_wheel_writes_all_of_it(tmp_path: Path) -> None:
    """Base and chart of an installation render as those here: nothing was left out of the wheel."""
    source = tmp_path / "source"  # setuptools builds in the source's folder
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "tests", "*.egg-info", "build"))
    shutil.copy(CHART / ".helmignore", source / "docker/kubernetes/chart")
    judge("python", "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, source)
    (wheel,) = tmp_path.glob("*.whl")
    judge("python", "-m", "venv", "--without-pip", tmp_path / "venv")
    python = tmp_path / "venv/bin/python"
    judge("python", "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel)
    (packages,) = tmp_path.glob("venv/lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    command = [python.with_name("canary-obs"), "export", "k8s", "--out", tmp_path / "k8s"]
    done = subprocess.run(command, cwd=tmp_path, timeout=60, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert str(tmp_path / "k8s/chart/Chart.yaml") in done.stdout
    assert objects(chart=tmp_path / "k8s/chart") == objects()
    assert kustomized(tmp_path / "k8s/base") == kustomized(BASE)
