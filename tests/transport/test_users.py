"""A Unix socket serves its own user and root alone, whatever became of its file mode."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import zmq

from canary_obs.hub.hub import Hub
from canary_obs.transport import admission
from canary_obs.transport.listener import ZmqListener
from tests.service.fakes import eventually

SERVICE_USER, OTHER_USER = 1234, 4321
# A ZeroMQ server greets whom it accepts; a refused peer reads the end of the stream.
PEER = """
import os, socket, sys
os.setuid(int(sys.argv[1]))
peer = socket.socket(socket.AF_UNIX)
peer.settimeout(30)
peer.connect(sys.argv[2])
print(len(peer.recv(64)))
"""


@pytest.fixture
def path():
    """Of a socket that any user can reach once its mode allows it."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o755)
    yield folder / "service.sock"
    shutil.rmtree(folder)


def _greeting_bytes(path: Path, user: int) -> int:
    command = [sys.executable, "-I", "-c", PEER, str(user), str(path)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become other users")
@pytest.mark.parametrize("user", [0, SERVICE_USER])
def test_own_user_and_root_are_admitted_and_others_refused_and_counted(path, user, monkeypatch, caplog):
    monkeypatch.setattr(os, "geteuid", lambda: user)
    hub = Hub()
    listener = ZmqListener(f"ipc://{path}", hub)
    path.chmod(0o777)
    try:
        assert _greeting_bytes(path, user) > 0
        assert _greeting_bytes(path, 0) > 0
        assert hub.counts().handshakes["other_user"] == 0
        assert _greeting_bytes(path, OTHER_USER) == 0
        eventually(lambda: hub.counts().handshakes["other_user"] == 1)
        eventually(lambda: "belongs neither to the service's user nor to root" in caplog.text)
    finally:
        listener.close()


@pytest.mark.parametrize(("user", "admitted"), [(0, [0]), (SERVICE_USER, [0, SERVICE_USER])])
def test_the_kernel_is_asked_for_own_user_and_root(user, admitted, monkeypatch):
    """The same without root, on a stand-in for the socket that keeps what it is told."""
    monkeypatch.setattr(os, "geteuid", lambda: user)
    options = []
    socket = SimpleNamespace(setsockopt=lambda option, value: options.append((option, value)))
    admission._admit_own_user(socket)
    assert options == [(zmq.IPC_FILTER_UID, number) for number in admitted]


@pytest.mark.parametrize(
    ("endpoint", "value", "cause"),
    [
        (b"ipc:///run/service.sock", 0, "other_user"),
        (b"ipc:///run/service.sock", errno.EMFILE, None),
        (b"tcp://0.0.0.0:9000", 0, None),
    ],
)
def test_only_a_refused_user_counts_as_one(endpoint, value, cause):
    event = int(zmq.EVENT_ACCEPT_FAILED).to_bytes(2, sys.byteorder) + value.to_bytes(4, sys.byteorder)
    assert admission._refusal_cause([event, endpoint]) == cause
