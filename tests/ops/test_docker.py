"""Images and compose file: accepted by their linters, hardened, no torch in the service."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.ops.tools import ROOT, judge

DOCKER = ROOT / "docker"
COMPOSE = DOCKER / "compose.yml"
DOCKERFILES = sorted(DOCKER.glob("*/Dockerfile"))


def documents(path: Path) -> list[dict]:
    return list(yaml.safe_load_all(path.read_text("utf-8")))


def test_hadolint_has_nothing_to_say() -> None:
    assert len(DOCKERFILES) == 2
    assert judge("hadolint", *DOCKERFILES) == ""


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.parent.name)
def test_images_run_as_nobody_in_particular(path: Path) -> None:
    lines = path.read_text("utf-8").splitlines()
    assert "USER 10001:10001" in lines
    assert any(line.startswith("HEALTHCHECK") for line in lines)
    installs = [line for line in lines if "pip install" in line]
    pinned = "-c constraints.txt" if path.parent.name == "demo" else "--no-cache-dir --"  # test_image_lock.py
    assert all(pinned in line for line in installs)
    assert any("torch" in line for line in installs) == (path.parent.name == "demo")


def test_compose_is_valid() -> None:
    judge("docker-compose", "-f", COMPOSE, "config", "-q")


def test_compose_is_hardened_and_mounts_what_is_here() -> None:
    (content,) = documents(COMPOSE)
    wanted = {"canary", "engine", "prometheus", "alertmanager", "grafana", "otel-collector", "tempo"}
    wanted |= {"otel-collector-health", "tempo-health"}
    assert set(content["services"]) == wanted
    for name, service in content["services"].items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ())), name
        for volume in service.get("volumes", ()):
            source, _, mode = volume.partition(":")[0], *volume.rpartition(":")[1:]
            if source.startswith("."):
                assert (DOCKER / source).exists(), volume
                assert mode == "ro", volume
            else:
                assert source in content["volumes"], volume


def test_the_files_that_the_live_test_runs_are_those_mounted() -> None:
    (content,) = documents(COMPOSE)
    mounted = {volume.split(":")[0] for volume in content["services"]["prometheus"]["volumes"]}
    assert {"./prometheus/prometheus.yml", "../alerts/rules"} <= mounted
    mounted = {volume.split(":")[0] for volume in content["services"]["alertmanager"]["volumes"]}
    assert "./alertmanager/alertmanager.yml" in mounted


def test_the_demo_token_is_the_same_on_both_sides() -> None:
    (content,) = documents(COMPOSE)
    token = (DOCKER / "prometheus/canary-token").read_text()
    assert content["services"]["canary"]["environment"]["KV_CANARY_TOKEN"] == f"${{CANARY_TOKEN:-{token}}}"


def test_grafana_finds_its_sources_and_boards() -> None:
    (content,) = documents(COMPOSE)
    mounts = dict(volume.split(":")[:2] for volume in content["services"]["grafana"]["volumes"])
    provisioning = DOCKER / "grafana/provisioning"
    (boards,) = documents(provisioning / "dashboards/boards.yml")
    assert [provider["options"]["path"] for provider in boards["providers"]] == [
        mounts["../dashboards/generated"]
    ]
    home = content["services"]["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert (ROOT / "dashboards/generated" / Path(home).name).exists()
    (sources,) = documents(provisioning / "datasources/sources.yml")
    for source in sources["datasources"]:
        host = source["url"].removeprefix("http://").split(":")[0]
        assert host in content["services"], source["name"]


def test_every_part_says_whether_it_is_healthy_and_is_waited_for() -> None:
    (content,) = documents(COMPOSE)
    services = content["services"]
    asked = {name.removesuffix("-health") for name in services if name.endswith("-health")}
    assert asked == {"otel-collector", "tempo"}, "their images have no program that could ask"
    for name, service in services.items():
        assert ("healthcheck" in service) is (name not in asked), name
        for other, wanted in dict.fromkeys(service.get("depends_on", ())).items():
            wanted = service["depends_on"][other] if isinstance(service["depends_on"], dict) else wanted
            if name.endswith("-health"):
                assert wanted is None, "it is the one who asks"
            else:
                assert wanted == {"condition": "service_healthy"}, (name, other)
                assert "healthcheck" in services[other], (name, other)


def test_spans_have_a_way_from_the_service_to_the_board() -> None:
    """Each end names what the next one listens on; tests/telemetry/test_tracing.py runs the first leg."""
    (content,) = documents(COMPOSE)
    (collector,), (tempo,) = documents(DOCKER / "otel/collector.yml"), documents(DOCKER / "tempo/tempo.yml")
    environment = content["services"]["canary"]["environment"]
    protocol = environment["OTEL_EXPORTER_OTLP_PROTOCOL"]
    host, _, port = environment["OTEL_EXPORTER_OTLP_ENDPOINT"].removeprefix("http://").partition(":")
    assert host in content["services"]
    (mounted,) = content["services"][host]["volumes"]
    assert mounted.startswith("./otel/collector.yml:")
    assert f"--config={mounted.split(':')[1]}" in content["services"][host]["command"]
    assert collector["receivers"]["otlp"]["protocols"][protocol]["endpoint"] == f"0.0.0.0:{port}"
    for pipeline in collector["service"]["pipelines"].values():
        for part in ("receivers", "processors", "exporters"):
            assert set(pipeline[part]) <= set(collector[part])
    assert set(collector["service"]["extensions"]) == set(collector["extensions"])
    (exporter,) = collector["service"]["pipelines"]["traces"]["exporters"]
    assert exporter.partition("/")[0] == "otlp", "gRPC, as the receiver that it names"
    host, _, port = collector["exporters"][exporter]["endpoint"].partition(":")
    assert host in content["services"]
    assert tempo["distributor"]["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"] == f"0.0.0.0:{port}"
    (sources,) = documents(DOCKER / "grafana/provisioning/datasources/sources.yml")
    (traces,) = [source for source in sources["datasources"] if source["type"] == "tempo"]
    assert traces["url"] == f"http://{host}:{tempo['server']['http_listen_port']}"


def test_who_asks_for_others_asks_where_they_answer() -> None:
    (content,) = documents(COMPOSE)
    (collector,), (tempo,) = documents(DOCKER / "otel/collector.yml"), documents(DOCKER / "tempo/tempo.yml")
    wanted = {
        "otel-collector": collector["extensions"]["health_check"]["endpoint"].replace(
            "0.0.0.0", "otel-collector"
        ),
        "tempo": f"tempo:{tempo['server']['http_listen_port']}/ready",
    }
    for name, address in wanted.items():
        test = content["services"][f"{name}-health"]["healthcheck"]["test"]
        assert f"'http://{address}" in test[-1]
        assert content["services"][f"{name}-health"]["image"] == content["services"]["canary"]["image"]
