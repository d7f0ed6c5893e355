"""Bad input: one line with value, rule and remedy, exit code 2, no traceback, no process left running."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryFile
from typing import Protocol

import psutil
import pytest

from canary_obs import cli
from canary_obs.config import ServiceConfig, load
from canary_obs.errors import ConfigurationError
from tests.forked import Forked


class Refuse(Protocol):
    """Runs a command line in this process: a process of its own proves what `run` does, and costs seconds."""

    def __call__(self, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]: ...


@pytest.fixture(scope="module")
def forks() -> None:
    """The server of forks runs before a test looks for processes that are left."""
    assert run("--version").returncode == 0


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Refuse]:
    """The command line in this process; nothing may be left running."""
    left = set(psutil.Process().children(recursive=True)), set(threading.enumerate())

    def invoke(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        for name in [name for name in os.environ if name.startswith("KV_CANARY")]:
            monkeypatch.delenv(name)
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        capsys.readouterr()
        code = cli.run(arguments)
        out, err = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, code, out, err)

    yield invoke
    assert (set(psutil.Process().children(recursive=True)), set(threading.enumerate())) == left


def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("KV_CANARY")}
    with TemporaryFile("w+") as output, TemporaryFile("w+") as errors:
        # In its own session, by which processes that it left running are found.
        process = Forked("canary_obs", *arguments, env=clean | environ, files=[output, errors], session=True)
        try:
            code = process.wait(120)
        finally:
            process.kill()
        assert [pid for pid in psutil.pids() if session_of(pid) == process.pid] == []
        said = [file.read() for file in (output, errors) if file.seek(0) == 0]
    return subprocess.CompletedProcess(arguments, code, *said)


def session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:  # ended since it was listed
        return None


def refused(done: subprocess.CompletedProcess[str], *texts: str) -> None:
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    for text in texts:
        assert text in done.stderr


@pytest.mark.parametrize(
    ("environ", "texts"),
    [
        ({"KV_CANARY_MODE": "loud"}, ("KV_CANARY_MODE='loud'", "none or log or raise")),
        (
            {"KV_CANARY_SWEEP_INTERVALL": "5"},
            ("KV_CANARY_SWEEP_INTERVALL", "Did you mean KV_CANARY_SWEEP_INTERVAL?"),
        ),
        ({"KV_CANARY_RANK": "-1"}, ("KV_CANARY_RANK='-1'", ">= 0")),
        ({"KV_CANARY_CONFIG": "/no/such.toml"}, ("KV_CANARY_CONFIG", "/no/such.toml", "readable TOML")),
    ],
)
def test_bad_environment(here: Refuse, environ: dict[str, str], texts: tuple[str, ...]) -> None:
    refused(here("demo", "--duration", "1", **environ), *texts)


@pytest.mark.parametrize(
    ("environ", "texts"),
    [
        ({"KV_CANARY_ENDPOINT": "foo"}, ("KV_CANARY_ENDPOINT='foo'", "not an ipc:// or tcp:// address")),
        (
            {"KV_CANARY_HOST": "no.such.host.invalid", "KV_CANARY_TOKEN": "0123456789abcdefgh"},
            ("KV_CANARY_HOST='no.such.host.invalid'", "cannot be bound", "an address of this machine"),
        ),
        ({"KV_CANARY_LOG_FILE": "/no/such/folder/log"}, ("KV_CANARY_LOG_FILE=", "cannot be written")),
    ],
)
def test_a_service_that_cannot_start(here: Refuse, environ: dict[str, str], texts: tuple[str, ...]) -> None:
    done = here("serve", "--port", "0", **environ)
    refused(done, *texts)
    assert len(done.stderr.splitlines()) == 1


def test_a_pipe_or_a_device_is_no_settings_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(ConfigurationError, match="cannot be read: it is not a file"):
            load(ServiceConfig, environ={"KV_CANARY_CONFIG": str(path)})


def test_a_refusal_ends_with_2_where_standard_error_is_full() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "canary_obs", "serve"],
            env=os.environ | {"KV_CANARY_PORT": "x"}, stderr=full, timeout=60, check=False,
        )  # fmt: skip
    assert done.returncode == 2


def test_a_file_that_is_no_text(here: Refuse, tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_bytes(b"\xff\xfe")
    done = here("serve", KV_CANARY_CONFIG=str(path))
    refused(done, f"KV_CANARY_CONFIG='{path}'", "cannot be read", "readable TOML")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (("--model", "no_such"), ("--model='no_such'", "Use one of")),
        (("--engine", "vllm"), ("--engine='vllm'", "two reference engines")),
    ],
)
def test_what_a_disaggregated_demo_cannot_send(
    here: Refuse, arguments: tuple[str, ...], texts: tuple[str, ...]
) -> None:
    done = here("demo", "--disaggregated", *arguments)
    refused(done, *texts)
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("perturb", ["real_kv_used=2", "nonsense=0.5", "real_kv_used", "real_kv_used=x"])
def test_bad_perturb(here: Refuse, perturb: str) -> None:
    refused(
        here("demo", "--duration", "1", "--perturb", perturb), "--perturb", perturb, "Modes are: req_to_token"
    )


def test_bad_shape_model_and_device(here: Refuse) -> None:
    refused(here("demo", "--duration", "1", "--shape", "huge"), "--shape='huge'", "Use demo or tiny")
    refused(here("demo", "--duration", "1", "--model", "gru"), "--model='gru'", "Use one of: llama")
    refused(here("demo", "--duration", "1", "--device", "toaster"), "--device='toaster'", "Use auto, cpu")


def test_missing_and_broken_checkpoint(here: Refuse, tmp_path: Path) -> None:
    refused(here("demo", "--duration", "1", "--checkpoint", "/no/such"), "/no/such", "no such directory")
    (tmp_path / "config.json").write_text("{")
    (tmp_path / "model.safetensors").write_bytes(b"broken")
    refused(here("demo", "--duration", "1", "--checkpoint", str(tmp_path)), str(tmp_path), "cannot be read")


@pytest.mark.usefixtures("forks")
def test_taken_port(here: Refuse, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        endpoint = f"ipc://{tmp_path}/service.sock"
        refused(here("serve", "--port", port, "--endpoint", endpoint), port, "in use")
        demo = run(
            "demo", "--shape", "tiny", "--serve", "--port", port, "--duration", "1", "--endpoint", endpoint
        )
        refused(demo, port, "in use")


@pytest.mark.usefixtures("forks")
def test_unwritable_socket_folder(here: Refuse, tmp_path: Path) -> None:
    # Root may write anywhere, so the folder is one that nobody can create.
    blocked = tmp_path / "file"
    blocked.write_text("")
    refused(run("serve", "--port", "0", "--endpoint", f"ipc://{blocked}/service.sock"), str(blocked))
    refused(
        here("demo", "--duration", "1", "--endpoint", "tcp://192.0.2.1:5000"),
        "tcp://192.0.2.1:5000",
        "loopback",
    )


def test_wide_bind_without_token(here: Refuse, tmp_path: Path) -> None:
    done = here("serve", "--host", "0.0.0.0", "--port", "0", "--endpoint", f"ipc://{tmp_path}/s.sock")
    refused(done, "--host='0.0.0.0'", "KV_CANARY_TOKEN")


def test_settings_are_printed_with_secrets_masked(here: Refuse) -> None:
    done = here("settings", KV_CANARY_TOKEN="s3cret", COLUMNS="200")
    assert done.returncode == 0
    assert "KV_CANARY_PATROL_BUDGET" in done.stdout
    assert "s3cret" not in done.stdout
