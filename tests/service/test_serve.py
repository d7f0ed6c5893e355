from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import msgspec
import pytest
import zmq

from canary_obs.config import CanaryConfig, ServiceConfig, masked
from canary_obs.errors import AddressInUse, ConfigurationError
from canary_obs.records import Violations
from canary_obs.serve import ServiceThread, _say, bind_port, open_when_free, serve
from canary_obs.transport.keys import EngineKeys, KeyKind, make_keys
from canary_obs.transport.links import LocalLink, ZmqLink
from canary_obs.transport.sender import open_link
from tests.service.fakes import FakeEngine, eventually, hello, identity, snapshot, violation


@pytest.fixture
def config(tmp_path):
    return ServiceConfig(endpoint=f"ipc://{tmp_path}/service.sock", port=0)


@pytest.fixture(autouse=True)
def nothing_is_left_running():
    before = set(threading.enumerate())
    yield
    eventually(lambda: not {one for one in threading.enumerate() if one not in before})


def test_engine_and_service_in_one_process(config):
    link = LocalLink()
    service, engine = ServiceThread(config, link=link), FakeEngine(link, identity())
    assert service.port > 0
    answer = eventually(lambda: swept(service))
    assert answer["status"] == "passed"
    page = httpx.get(f"{service.url}/metrics").text
    assert 'kv_canary_state{engine="fake",instance="test",rank="0",state="ok"} 1.0' in page
    assert httpx.get(f"{service.url}/readyz").status_code == 200
    engine.stop()
    service.close()
    service.close()
    assert not service.alive


def swept(service):
    answer = httpx.post(f"{service.url}/canary/sweep?wait=true", timeout=30)
    return answer.json() if answer.status_code == 200 else None


def test_a_service_waits_until_port_and_endpoint_are_free(config, capsys, monkeypatch):
    monkeypatch.setattr("canary_obs.serve.RETRY_SECONDS", 0.02)
    old = ServiceThread(config)
    same = ServiceConfig(endpoint=config.endpoint, port=old.port)
    with pytest.raises(AddressInUse, match="cannot be bound"):
        open_when_free(same, 0.0, threading.Event())
    with ThreadPoolExecutor(1) as pool:
        new = pool.submit(open_when_free, same, 60.0, threading.Event())
        try:
            said = [eventually(lambda: "failed" if new.done() else capsys.readouterr().err)]
            with pytest.raises(AddressInUse, match="is listening there"):
                open_when_free(config, 0.1, threading.Event())
            said.append(capsys.readouterr().err)
            assert [one.count("\n") for one in said] == [1, 1], "one line from each, however often it tries"
        finally:
            old.close()
        opened = new.result(10.0)
    assert httpx.get(f"{opened.url}/healthz").status_code == 200
    opened.close()


def test_a_line_that_cannot_be_written_is_left_out(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    _say("closed")
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        _say("full")
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            full.close()


def test_a_service_that_waits_can_be_stopped(config):
    old, stop = ServiceThread(config), threading.Event()
    stop.set()
    assert open_when_free(config, 60.0, stop) is None
    old.close()


def test_a_full_log_disk_degrades_the_state_and_nothing_else(config):
    link = LocalLink()
    full = ServiceConfig(endpoint=config.endpoint, port=0, log_file="/dev/full")
    service = ServiceThread(full, link=link)
    me = identity()
    assert all(link.send(message) for message in (hello(me), Violations(identity=me, rows=(violation(),))))
    link.send(snapshot(me, 1))
    eventually(lambda: service.hub.verdict()[0] == "degraded")
    status = httpx.get(f"{service.url}/canary/status").json()
    assert any("violation_log: OSError" in reason for reason in status["reasons"])
    page = httpx.get(f"{service.url}/metrics").text
    assert "kv_canary_log_events_dropped_total 1.0" in page
    assert 'kv_canary_service_faults_total{part="violation_log"} 1.0' in page
    service.close()


def test_a_port_in_use_leaves_nothing_open(config, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as occupied:
        port = occupied.getsockname()[1]
        busy = ServiceConfig(endpoint=config.endpoint, port=port)
        with pytest.raises(ConfigurationError, match="Address already in use") as caught:
            ServiceThread(busy)
    assert (caught.value.setting, caught.value.value) == ("port", port)
    assert "KV_CANARY_PORT" in caught.value.remedy
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_socket_folder_releases_the_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with pytest.raises(ConfigurationError, match="/proc/nobody") as caught:
        ServiceThread(ServiceConfig(endpoint="ipc:///proc/nobody/x.sock", port=port))
    assert caught.value.setting == "endpoint"
    socket.create_server(("127.0.0.1", port)).close()


def test_an_address_of_another_machine_names_the_host(config):
    strange = ServiceConfig(endpoint=config.endpoint, host="192.0.2.1", port=0, token="0123456789abcdef")
    with pytest.raises(ConfigurationError, match=r"192\.0\.2\.1:0 cannot be bound") as caught:
        ServiceThread(strange)
    assert caught.value.setting == "host"


def test_a_bad_log_file_releases_everything(config, tmp_path):
    bad = ServiceConfig(endpoint=config.endpoint, port=0, log_file=str(tmp_path / "no/v.log"))
    with pytest.raises(ConfigurationError, match="log_file"):
        ServiceThread(bad)
    assert not (tmp_path / "service.sock").exists()


def test_a_wide_bind_without_a_token_is_refused_by_serve(config):
    with pytest.raises(ConfigurationError, match="only binds to loopback"):
        serve(ServiceConfig(endpoint=config.endpoint, host="0.0.0.0", port=0))


def test_a_token_is_not_printed(tmp_path):
    code = (
        "import os, signal, threading, canary_obs.serve as s\n"
        "threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "s.serve()\n"
    )
    env = os.environ | {
        "KV_CANARY_ENDPOINT": f"ipc://{tmp_path}/x.sock",
        "KV_CANARY_PORT": "0",
        "KV_CANARY_TOKEN": "very-secret",
    }
    result = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "token=***" in result.stderr
    assert "very-secret" not in result.stderr


@pytest.fixture
def keyed(tmp_path):
    """Settings of a service and of its engine, on loopback with keys; and both secret keys."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        endpoint = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    files = {kind: str(path) for kind, path in make_keys(tmp_path / "keys").items()}
    service = ServiceConfig(
        endpoint=endpoint, port=0, log_file=str(tmp_path / "v.log"),
        service_secret_key_file=files[KeyKind.SERVICE_SECRET],
        engine_public_keys_file=files[KeyKind.ENGINE_PUBLIC],
    )  # fmt: skip
    engine = CanaryConfig(
        endpoint=endpoint,
        engine_secret_key_file=files[KeyKind.ENGINE_SECRET],
        service_public_key_file=files[KeyKind.SERVICE_PUBLIC],
    )
    return service, engine, [Path(files[kind]).read_text().split()[1] for kind in KeyKind if kind.secret]


def test_with_keys_an_engine_sweeps_on_demand_and_no_secret_is_shown(keyed, tmp_path, caplog):
    config, settings, secrets = keyed
    service = ServiceThread(config)
    link = open_link(settings)
    engine = FakeEngine(link, identity())
    assert eventually(lambda: swept(service))["status"] == "passed"
    me = engine.who
    link.send(msgspec.structs.replace(hello(me), settings=masked(settings)))
    link.send(Violations(identity=me, rows=(violation(),)))
    eventually(service.hub.violations)
    paths = ("/metrics", "/canary/status", "/canary/violations", "/")
    shown = [httpx.get(service.url + path).text for path in paths]
    assert settings.engine_secret_key_file in shown[1]
    engine.stop()
    link.close()
    service.close()
    shown += [caplog.text, (tmp_path / "v.log").read_text(), repr(masked(config))]
    assert not [secret for secret in secrets for text in shown if secret in text]


def test_refused_connections_are_counted_and_change_no_state(keyed):
    config, _, _ = keyed
    service = ServiceThread(config)
    public, secret = zmq.curve_keypair()
    own = Path(config.service_secret_key_file).read_text().split()[1]
    keys = EngineKeys(public=public, secret=secret, service=zmq.curve_public(own.encode()))
    link = ZmqLink(config.endpoint, keys=keys)
    link.send(hello(identity()))
    # It tries again, and may have been refused twice.
    refused = re.compile(r'kv_canary_hub_handshakes_refused_total\{cause="unknown_key"\} [1-9]')
    eventually(lambda: refused.search(httpx.get(f"{service.url}/metrics").text))
    assert httpx.get(f"{service.url}/canary/status").json()["state"] == "off"
    assert service.hub.ranks() == ()
    link.close()
    service.close()


def test_a_bad_key_file_is_refused_before_anything_is_opened(keyed):
    config, _, secrets = keyed
    os.chmod(config.service_secret_key_file, 0o644)
    with pytest.raises(ConfigurationError, match="has mode 0644") as caught:
        ServiceThread(config)
    assert caught.value.value == config.service_secret_key_file
    assert not [secret for secret in secrets if secret in str(caught.value)]
    assert not os.path.exists(config.log_file)


def test_the_service_needs_neither_torch_nor_triton():
    code = (
        "import sys, json, canary_obs.serve\n"
        "print(json.dumps([m for m in ('torch', 'triton', 'canary_kernels') if m in sys.modules]))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert json.loads(result.stdout) == []


def test_the_engine_side_of_the_wire_loads_no_web_and_no_exporter():
    code = (
        "import sys, json, canary_obs.transport.links\n"
        "strangers = ('fastapi', 'pydantic', 'prometheus_client', 'opentelemetry', 'uvicorn')\n"
        "print(json.dumps([m for m in strangers if m in sys.modules]))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert json.loads(result.stdout) == []


def test_audited_requests_and_violations_are_in_the_same_log(config, tmp_path):
    link = LocalLink()
    logged = msgspec.structs.replace(config, token="very-secret", log_file=str(tmp_path / "v.log"))
    service, me = ServiceThread(logged, link=link), identity()
    for message in (hello(me), snapshot(me, 1), Violations(identity=me, rows=(violation(),))):
        link.send(message)
    eventually(lambda: service.hub.violations())
    credentials = {"Authorization": "Bearer very-secret"}
    assert httpx.post(f"{service.url}/canary/acknowledge", headers=credentials).status_code == 202
    service.close()
    text = (tmp_path / "v.log").read_text()
    lines = {line["event"]: line for line in map(json.loads, text.splitlines())}
    assert lines.keys() == {"kv_cache_violation", "order"}
    audited = lines["order"]
    assert (audited["route"], audited["token"], audited["status"]) == ("/canary/acknowledge", "default", 202)
    assert audited["client"] == "127.0.0.1"
    assert "very-secret" not in text


def test_accepted_connections_send_at_once(config):
    with bind_port(config) as server, socket.create_connection(server.getsockname()[:2]):
        accepted, _ = server.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
