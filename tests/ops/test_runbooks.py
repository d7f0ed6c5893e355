"""Every command of the runbooks, as it is printed: against a live service, Prometheus and Alertmanager."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from alerts.render import RUNBOOKS
from alerts.tests.build import alerts
from tests.e2e.conftest import System
from tests.ops.monitoring_stack import MonitoringStack
from tests.ops.runbook_commands import Command, commands, of_kind
from tests.telemetry.receiver import Receiver, open_server

INJECT_TOKEN = "token-of-those-who-may-drill"
KUBECONFIG = """apiVersion: v1
kind: Config
clusters: [{name: nobody, cluster: {server: "http://127.0.0.1:9"}}]
contexts: [{name: nobody, context: {cluster: nobody, user: nobody}}]
users: [{name: nobody}]
current-context: nobody
"""


def test_every_runbook_has_commands_with_their_output_and_says_when_to_escalate() -> None:
    by_runbook: dict[str, list[Command]] = {name: [] for name in alerts()}
    for command in commands():
        by_runbook[command.runbook].append(command)
    for name, found in by_runbook.items():
        text = (RUNBOOKS / f"{name}.md").read_text("utf-8")
        assert any(command.prints for command in found) or name == "KVCanaryRestarting", name
        assert text.count("```sh") == len(found), f"{name}: a block is not in the form that is run"
        assert len(text.partition("## Escalation\n")[2].split()) > 4, name


@pytest.mark.ops
@pytest.mark.timeout(240)
def test_the_commands_do_what_the_runbooks_say(system: System, stack: MonitoringStack) -> None:
    server = open_server(Receiver(), "grpc")
    environ = _incident_to_respond_to(system, stack, server.url)
    failed = []
    # Those about the incident first: the others acknowledge everything.
    for command in sorted(of_kind(""), key=lambda command: "$INCIDENT" not in command.script):
        done = _run(["bash", "-euo", "pipefail", "-c", command.script], environ, system.folder)
        if done.returncode not in _accepted(command.script) or not command.promises(done.stdout):
            failed.append(f"{command.runbook}: {command.script}{done.stdout[:400]}{done.stderr}")
    server.close()
    assert not failed, "\n".join(failed)


def _accepted(script: str) -> set[int]:
    """Exit codes of a block: these two commands exit by what they saw (docs/cli.md), here damage."""
    return {0, 3} if re.search(r"canary-obs (status|sweep --wait)", script) else {0}


def _incident_to_respond_to(system: System, stack: MonitoringStack, receiver: str) -> dict[str, str]:
    tokens = system.folder / "tokens.toml"
    tokens.write_text(f'[drills]\ntoken = "{INJECT_TOKEN}"\nscopes = ["inject"]\n')
    tokens.chmod(0o600)
    drills = {"KV_CANARY_DRILL_ENABLED": "true"}
    system.serve(
        KV_CANARY_TOKENS_FILE=str(tokens), OTEL_EXPORTER_OTLP_ENDPOINT=receiver,
        OTEL_EXPORTER_OTLP_PROTOCOL="grpc", **drills,
    )  # fmt: skip
    system.start(
        "demo", "--shape", "tiny", "--endpoint", system.endpoint, "--perturb", "real_kv_used=1",
        KV_CANARY_INSTANCE="sick", KV_CANARY_PERTURB_LIMIT="1", KV_CANARY_PERTURB_WARMUP="50", **drills,
    )  # fmt: skip
    system.until(stack.ready)
    system.until(lambda: bool(stack.query("rate(kv_canary_violations_total[1m])")))
    system.until(lambda: stack.pager.find("/page", "firing", alertname="KVCanaryDamage") is not None)
    (info,) = stack.query("kv_canary_incident_info")
    return {
        "SERVICE_URL": f"http://127.0.0.1:{system.port}",
        "TOKEN": system.token,
        "INJECT_TOKEN": INJECT_TOKEN,
        "PROMETHEUS_URL": stack.prometheus_url,
        "ALERTMANAGER_URL": f"http://127.0.0.1:{stack.alertmanager_port}",
        "INCIDENT": info["metric"]["incident_id"],
        "USER": "oncall",
    }


@pytest.mark.ops
def test_kubectl_takes_the_commands(tmp_path: Path) -> None:
    """Without a cluster: a command that kubectl takes fails at the connection, and any other before it."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is NOT INSTALLED: apt-get install kubernetes-client")
    (tmp_path / "config").write_text(KUBECONFIG)
    environ = {"KUBECONFIG": str(tmp_path / "config"), "NAMESPACE": "llm", "POD": "llm-engine-0"}
    lines = {line for command in of_kind("kubernetes") for line in command.script.splitlines()}
    assert len(lines) > 8
    for line in sorted(lines):
        assert line.startswith('kubectl -n "$NAMESPACE" '), line
        assert "was refused" in _kubectl(line.partition(" | ")[0], environ, tmp_path), line
    wrong = 'kubectl -n "$NAMESPACE" logs "$POD" --container-name engine'
    assert "unknown flag" in _kubectl(wrong, environ, tmp_path)


def _kubectl(line: str, environ: dict[str, str], folder: Path) -> str:
    words = shlex.split(line.replace('"$NAMESPACE"', environ["NAMESPACE"]).replace('"$POD"', environ["POD"]))
    return _run(words, environ, folder).stderr


def _run(words: list[str], environ: dict[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        words, env={"PATH": path, "HOME": str(folder)} | environ, cwd=folder, timeout=60,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
