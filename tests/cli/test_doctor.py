"""The doctor finds planted misconfigurations and names the remedy; what is fine it calls fine."""

from __future__ import annotations

import json
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import msgspec
import pytest

from canary_obs import __version__
from canary_obs.cli import run
from canary_obs.config import ServiceConfig
from canary_obs.serve import ServiceThread
from canary_obs.transport.links import LocalLink
from canary_obs.vocabulary import Mode
from tests.service.fakes import FULL, hello, snapshot


@pytest.fixture
def host(monkeypatch, tmp_path):
    """Variables of this process; a socket folder of its own, in which nobody listens."""
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setenv("KV_CANARY_ENDPOINT", f"ipc://{tmp_path}/run/service.sock")
    monkeypatch.setenv("KV_CANARY_URL", "http://127.0.0.1:9")
    return lambda name, value: monkeypatch.setenv(f"KV_CANARY_{name}", str(value))


@pytest.fixture
def findings(capsys):
    """Runs the doctor; its findings that are not fine, by topic, and the exit code."""

    def examine(*arguments):
        code = run(["doctor", "--json", *arguments])
        found = json.loads(capsys.readouterr().out)
        assert all(one["remedy"] for one in found if one["grade"] != "fine"), found
        return code, {(one["topic"], one["text"]): one["remedy"] for one in found if one["grade"] != "fine"}

    return examine


def remedy_of(found, *texts):
    """The remedy of the only finding whose text has all of these."""
    (remedy,) = [remedy for (_, text), remedy in found.items() if all(part in text for part in texts)]
    return remedy


def test_1_a_misspelt_setting(host, findings):
    host("SWEEP_INTERVALL", 5)
    code, found = findings()
    assert code == 4
    assert "Did you mean KV_CANARY_SWEEP_INTERVAL?" in remedy_of(found, "KV_CANARY_SWEEP_INTERVALL")


def test_2_tokens_that_others_can_read(host, findings, tmp_path):
    path = tmp_path / "tokens.toml"
    path.write_text("")
    path.chmod(0o644)
    host("TOKENS_FILE", path)
    assert remedy_of(findings()[1], "others may read it", "0644") == f"Run: chmod 600 {path}"


def test_3_a_socket_folder_that_everyone_can_write(host, findings, tmp_path):
    (tmp_path / "run").chmod(0o777)
    assert "chmod 700" in remedy_of(findings()[1], "is writable by everyone")


def test_4_engines_on_another_host_without_keys(host, findings):
    host("ENDPOINT", "tcp://10.0.0.5:9470")
    assert "canary-obs keys FOLDER" in remedy_of(findings()[1], "beyond loopback TCP needs keys")


def test_5_no_service_runs(host, findings):
    code, found = findings()
    assert code == 4
    assert "canary-obs serve" in remedy_of(found, "no service listens at ipc://")
    assert remedy_of(found, "no service answers at http://127.0.0.1:9: Connection refused")


def test_6_a_log_file_in_no_folder(host, findings, tmp_path):
    host("LOG_FILE", tmp_path / "none/log")
    assert "a folder that the service may write" in remedy_of(findings()[1], "KV_CANARY_LOG_FILE")


@pytest.fixture
def fleet_findings(cli, host, fleet, monkeypatch, findings):
    monkeypatch.setenv("KV_CANARY_URL", fleet.url)
    return findings


def send(fleet, number, **changes):
    rank = fleet.ranks[number]
    rank.send(msgspec.structs.replace(hello(rank.identity), versions={"canary_obs": __version__}, **changes))
    return rank


def test_7_a_wrong_token(fleet_findings, monkeypatch):
    monkeypatch.setenv("KV_CANARY_TOKEN", "wrong-0123456789abcdef")
    _, found = fleet_findings()
    assert [text for _, text in found if "--token-file FILE, or set KV_CANARY_TOKEN_FILE" in text]


def test_8_to_15_what_ranks_tell(fleet, fleet_findings):
    for number in range(64):
        send(fleet, number)
    old = fleet.ranks[8]
    old.send(hello(old.identity))  # release 0.1.0
    hole = msgspec.structs.replace(FULL, protected_slot_bytes=48)
    send(fleet, 9, groups=(hole,))
    send(fleet, 10, settings={"perturb": "real_kv_used=0.1"})
    send(fleet, 11, settings={"idle_sweep": "False", "busy_sweep": "False"})
    for number, changes in ((12, {"patrol": None}), (13, {"mode": Mode.NONE}), (14, {"paused": True})):
        fleet.ranks[number].send(snapshot(fleet.ranks[number].identity, 9, **changes))
    late = fleet.ranks[15]
    late.send(snapshot(late.identity, 9, time_ns=1_000_000_000))
    fleet.damage(16)
    code, found = fleet_findings()
    assert code == 4
    expected = {
        ("canary_obs 0.1.0", "1 of 64 ranks (fake/test/8)"): "one release everywhere",
        ("group full", "99.6 % of its KV bytes"): "docs/checks.md",
        ("injected on purpose", "(fake/test/10)"): "KV_CANARY_PERTURB",
        ("no sweep begins by itself", "(fake/test/11)"): "KV_CANARY_BUSY_SWEEP=true",
        ("the patrol is off", "(fake/test/12)"): "KV_CANARY_PATROL_BUDGET",
        ("mode none", "(fake/test/13)"): "KV_CANARY_MODE=log",
        ("clock differs", "(fake/test/15)"): "NTP",
        ("1 violation",): "canary-obs incident show ID",
    }
    for texts, remedy in expected.items():
        assert remedy in remedy_of(found, *texts), texts


def test_16_a_rank_that_is_missing(fleet, fleet_findings, monkeypatch):
    send(fleet, 0, expected_ranks=tuple(range(65)))
    now = fleet.hub._clock() + 6
    monkeypatch.setattr(fleet.hub, "_clock", lambda: now)
    assert "KV_CANARY_ENDPOINT" in remedy_of(fleet_findings()[1], "no word of ranks 64")


def test_tokens_that_were_edited_and_cannot_be_read(fleet, fleet_findings):
    fleet.tokens.write_text("drills = [")
    code, found = fleet_findings()
    assert code == 4
    assert "also those that you took out" in remedy_of(found, "tokens_file", "TOMLDecodeError")


@contextmanager
def prometheus(groups, targets):
    class Fake(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            rules = {"groups": [{"name": name} for name in groups]}
            data = rules if "rules" in self.path else {"activeTargets": targets}
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"data": data}).encode())

        def log_message(self, *_: object) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Fake) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))  # its end is seen at once
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_service_without_a_token(host, findings):
    with closing(ServiceThread(ServiceConfig(port=0), link=LocalLink())) as service:
        host("URL", service.url)
        assert "--token-file" in remedy_of(findings()[1], "the service has no token")


def test_17_and_18_a_prometheus_without_rules_or_target(fleet_findings):
    with prometheus(["kv-canary-blind"], []) as url:
        _, found = fleet_findings("--prometheus", url)
    assert "canary-obs export alerts" in remedy_of(found, "kv-canary-damage")
    assert "canary-obs export compose" in remedy_of(found, "no target of the job kv-canary")


def test_what_is_fine_is_called_fine(fleet, cli, host, fleet_findings, monkeypatch):
    monkeypatch.setenv("KV_CANARY_URL", fleet.url)
    for number in range(64):
        send(fleet, number)
    names = ["kv-canary-blind", "kv-canary-damage", "kv-canary-debt", "kv-canary-recording"]
    with prometheus(names, [{"labels": {"job": "kv-canary"}, "health": "up"}]) as url:
        _, found = fleet_findings("--prometheus", url)
        assert {topic for topic, _ in found} <= {"endpoint", "versions"}  # this process has no socket
        text = cli(f"doctor --prometheus {url}")[1]
    for fine in ("all rule groups are loaded", "1 target up", "64 attached", "agree to 5 s"):
        assert fine in text
