"""The health checks of docker/compose.yml, run as they are written, against the real parts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from canary_obs.engines.toolkit.service_process import free_port
from tests.e2e.conftest import System
from tests.ops.monitoring_stack import MonitoringStack
from tests.ops.tools import ROOT

pytestmark = [pytest.mark.ops, pytest.mark.timeout(120)]

SERVICES = yaml.safe_load((ROOT / "docker/compose.yml").read_text("utf-8"))["services"]


def healthy(name: str, ports: dict[int, int], environ: dict[str, str]) -> bool:
    """Whether the check of a part succeeds here, with its ports where this test has them."""
    kind, *words = SERVICES[name]["healthcheck"]["test"]
    if kind == "CMD-SHELL":
        words = ["/bin/sh", "-c", words[0].replace("$$", "$")]
    words = [re.sub(r"(?<=127\.0\.0\.1:)\d+", lambda port: str(ports[int(port[0])]), word) for word in words]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        words,
        env={"PATH": path, "HOME": "/nonexistent"} | environ,
        timeout=60,
        capture_output=True,
        check=False,
    )
    return done.returncode == 0


def test_a_part_is_healthy_once_it_works_and_not_before(system: System, stack: MonitoringStack) -> None:
    ports = {9464: system.port, 9090: stack.prometheus_port, 9093: stack.alertmanager_port}
    engine = SERVICES["engine"]["environment"]
    assert engine["KV_CANARY_URL"] == "http://canary:9464"
    asks = {"KV_CANARY_URL": f"http://127.0.0.1:{system.port}", "KV_CANARY_TOKEN": system.token}
    assert not healthy("canary", ports, {})
    assert not healthy("engine", ports, asks), "no service"
    system.serve()
    assert healthy("canary", ports, {})
    assert not healthy("engine", ports, asks), "no engine"
    system.engine()
    system.until(lambda: system.state() == "ok")
    assert healthy("engine", ports, asks)
    system.until(stack.ready)
    for name in ("prometheus", "alertmanager"):
        assert healthy(name, ports, {}), name
        assert not healthy(name, dict.fromkeys(ports, free_port()), {}), name
