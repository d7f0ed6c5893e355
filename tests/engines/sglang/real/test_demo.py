"""`canary-obs demo --engine sglang`: what it prints of planted faults, and that a service hears of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from canary_obs.hub.hub import Hub
from canary_obs.transport.listener import ZmqListener
from tests.engines.sglang.real.server import ROOT, environment


def test_the_ledger_of_injected_faults_is_printed_and_reported(tmp_path: Path) -> None:
    """After a last check of every record: each injection has ended, each violation has its reason."""
    command = "demo --engine sglang --steps 300 --json --perturb next_token_swap=0.1,real_kv_used=0.1"
    with TemporaryDirectory(prefix="kvc") as folder:
        endpoint = f"ipc://{Path(folder)}/s.sock"
        hub = Hub()
        listener = ZmqListener(endpoint, hub)
        given = {"KV_CANARY_ENDPOINT": "ipc:///somewhere/else.sock", "KV_CANARY_PERTURB_LIMIT": "12"}
        try:
            done = subprocess.run(
                [sys.executable, "-m", "canary_obs", *command.split(), "--endpoint", endpoint], cwd=ROOT,
                env=os.environ | environment(tmp_path, given),
                capture_output=True, text=True, timeout=200, check=False,
            )  # fmt: skip
        finally:
            listener.close()
    assert done.returncode == 0, done.stderr[-4000:]
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["steps"] >= 300
    ledger = summary["injections"]
    assert ledger.keys() == {"next_token_swap", "real_kv_used"}
    assert sum(tally["injected"] for tally in ledger.values()) == 12
    for tally in ledger.values():
        assert tally["detected"] + tally["masked"] == tally["injected"] > 0
        assert (tally["missed"], tally["open"]) == (0, 0)
    found = summary["violations_by_reason"]
    assert {"write_token", "kv_data"} <= found.keys() <= {"write_token", "token", "chain", "kv_data"}
    assert sum(found.values()) == summary["violations"]
    assert (summary["state"], summary["observer_faults"]) == ("violated", {})
    assert sum(": fault injected: mode=" in line for line in done.stderr.splitlines()) == 12
    (rank,) = hub.ranks()
    assert rank.identity.engine == "sglang"
    assert rank.snapshot is not None
    assert rank.snapshot.step > 100
