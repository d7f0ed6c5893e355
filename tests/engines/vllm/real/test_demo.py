"""`canary-obs demo --engine vllm`: what it prints, and that a service it is pointed to hears it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from canary_obs.hub.hub import Hub
from canary_obs.transport.listener import ZmqListener
from canary_obs.vocabulary import State


def test_the_demo_reports_to_the_service_it_is_given() -> None:
    with TemporaryDirectory(prefix="kvc") as folder:
        endpoint = f"ipc://{Path(folder)}/s.sock"
        hub = Hub()
        listener = ZmqListener(endpoint, hub)
        try:
            command = ["demo", "--engine", "vllm", "--endpoint", endpoint, "--steps", "400", "--json"]
            done = subprocess.run(
                [sys.executable, "-m", "canary_obs", *command],
                env=os.environ | {"KV_CANARY_ENDPOINT": "ipc:///somewhere/else.sock"},
                capture_output=True, text=True, timeout=200, check=False,
            )  # fmt: skip
        finally:
            listener.close()
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (summary["steps"], summary["violations"], summary["state"]) == (400, 0, "ok")
    (rank,) = hub.ranks()
    assert rank.identity.engine == "vllm"
    assert rank.snapshot is not None
    assert (rank.snapshot.state, rank.snapshot.state_reasons) == (State.OK, ())
    assert rank.snapshot.step > 100
    assert summary["slots_verified"] > 100_000
