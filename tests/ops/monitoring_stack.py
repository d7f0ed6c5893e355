"""A monitoring stack of real parts on loopback: Prometheus, Alertmanager and a pager."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PROMETHEUS, ALERTMANAGER = "prometheus", "prometheus-alertmanager"
PAGER_IN_CONFIG = "http://pager.example:9095"


def require_monitoring() -> None:
    """Skip the test where Prometheus or Alertmanager is not installed."""
    for program in (PROMETHEUS, ALERTMANAGER):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is NOT INSTALLED: apt-get install prometheus prometheus-alertmanager")


@dataclass(slots=True)
class Call:
    """An alert of a webhook call, and when it was received (time.time())."""

    path: str
    received: float
    alert: dict[str, Any]


class Pager:
    """A webhook receiver that answers 200 and records the alerts."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        pager = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                now = time.time()
                pager.calls += [Call(self.path, now, alert) for alert in body["alerts"]]
                self.send_response(200)
                self.end_headers()

            def log_message(self, *arguments: object) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def find(self, path: str, status: str, **labels: str) -> Call | None:
        """The first call with these labels; None when there was none."""
        for call in list(self.calls):
            own = call.alert["labels"]
            if call.path == path and call.alert["status"] == status and labels.items() <= own.items():
                return call
        return None

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@dataclass(slots=True)
class MonitoringStack:
    """Prometheus and Alertmanager with the repository's configuration files and local addresses."""

    folder: Path
    prometheus_port: int
    alertmanager_port: int
    canary_port: int
    token: str
    pager: Pager = field(default_factory=Pager)
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def prometheus_url(self) -> str:
        return f"http://127.0.0.1:{self.prometheus_port}"

    def lay_out(self, *more_ports: int, interval: str = "1s") -> None:
        """Copy the configuration and write the target files; the pager's address changes, and the interval.

        more_ports: of further canary services.
        """
        config = (ROOT / "docker/prometheus/prometheus.yml").read_text()
        assert "_interval: 1s" in config
        (self.folder / "prometheus.yml").write_text(config.replace(": 1s\n", f": {interval}\n"))
        (self.folder / "canary-token").write_text(self.token)
        shutil.copytree(ROOT / "alerts/rules", self.folder / "rules")
        for kind, port in (("targets", self.canary_port), ("alertmanagers", self.alertmanager_port)):
            (self.folder / kind).mkdir()
            ports = (port, *more_ports) if kind == "targets" else (port,)
            addresses = json.dumps([f"127.0.0.1:{each}" for each in ports])
            (self.folder / kind / "local.yml").write_text(f"- targets: {addresses}\n")
        routing = (ROOT / "docker/alertmanager/alertmanager.yml").read_text()
        assert PAGER_IN_CONFIG in routing
        (self.folder / "alertmanager.yml").write_text(routing.replace(PAGER_IN_CONFIG, self.pager.url))

    def set_interval(self, interval: str) -> None:
        """Scrape and evaluate at another interval from now on."""
        path = self.folder / "prometheus.yml"
        path.write_text(re.sub(r"(_interval|_timeout): \d+\w", rf"\1: {interval}", path.read_text()))
        self.processes[-1].send_signal(signal.SIGHUP)
        self.wait_for_reload()

    def wait_for_reload(self) -> None:
        """Until Prometheus has read its configuration again."""
        log = self.folder / f"{PROMETHEUS}.log"
        deadline = time.monotonic() + 60
        while log.read_text(errors="replace").count("Completed loading of configuration file") < 2:
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.05)

    def start(self) -> None:
        self._run(
            ALERTMANAGER,
            f"--config.file={self.folder}/alertmanager.yml",
            f"--storage.path={self.folder}/alertmanager",
            f"--web.listen-address=127.0.0.1:{self.alertmanager_port}",
            "--cluster.listen-address=",
        )
        self._run(
            PROMETHEUS,
            f"--config.file={self.folder}/prometheus.yml",
            f"--storage.tsdb.path={self.folder}/prometheus",
            f"--web.listen-address=127.0.0.1:{self.prometheus_port}",
            "--enable-feature=exemplar-storage",
        )

    def _run(self, name: str, *arguments: str) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            command = [name, *arguments]
            self.processes.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT))

    def get(self, path: str, **parameters: str) -> Any:
        """The `data` of a Prometheus API answer; an error answer fails the test with its text."""
        url = f"{self.prometheus_url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                content = json.load(answer)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path} {parameters}: {error.read().decode()}") from None
        assert content["status"] == "success", content
        assert not content.get("warnings"), content
        return content["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """An instant vector."""
        return self.get("query", query=expression)["result"]

    def firing(self) -> set[str]:
        """Names of the alerts that fire."""
        return {series["metric"]["alertname"] for series in self.query('ALERTS{alertstate="firing"}')}

    def muted(self, **labels: str) -> bool:
        """Whether Alertmanager holds such an alert and another one inhibits it."""
        url = f"http://127.0.0.1:{self.alertmanager_port}/api/v2/alerts"
        with urllib.request.urlopen(url, timeout=30) as answer:
            alerts = json.load(answer)
        return any(
            labels.items() <= alert["labels"].items() and alert["status"]["inhibitedBy"] for alert in alerts
        )

    def ready(self) -> bool:
        """Whether Prometheus has scraped the canary and evaluated the rules."""
        return self.started() and bool(self.query('up{job="kv-canary"} == 1')) and bool(self.query("ALERTS"))

    def started(self) -> bool:
        """Whether Prometheus answers queries; it refuses them while it starts."""
        try:
            with urllib.request.urlopen(f"{self.prometheus_url}/-/ready", timeout=5):
                return True
        except OSError:
            return False

    def logs(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-3000:] for path in self.folder.glob("*.log"))

    def close(self) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.pager.close()
