"""`canary-obs demo --engine vllm`: what it prints, and that a service it is pointed to hears it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from canary_obs.engines.vllm.worker import runtime_of
from canary_obs.hub.hub import Hub
from canary_obs.transport.listener import ZmqListener
from canary_obs.vocabulary import State
from tests import forked


def test_the_demo_reports_to_the_service_it_is_given() -> None:
    with TemporaryDirectory(prefix="kvc") as folder:
        endpoint = f"ipc://{Path(folder)}/s.sock"
        hub = Hub()
        listener = ZmqListener(endpoint, hub)
        try:
            command = ["demo", "--engine", "vllm", "--endpoint", endpoint, "--steps", "400", "--json"]
            other = {"KV_CANARY_ENDPOINT": "ipc:///somewhere/else.sock"}
            done = forked.run("canary_obs", *command, env=os.environ | other, seconds=200)
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


@pytest.mark.nightly
def test_the_ledger_of_injected_faults_is_printed() -> None:
    """After a last check of every record: each injection has ended, each violation has its reason."""
    command = ["demo", "--engine", "vllm", "--steps", "200", "--json", "--perturb"]
    done = forked.run(
        "canary_obs", *command, "next_token_swap=0.1,real_kv_used=0.1", seconds=200,
        env=os.environ | {"KV_CANARY_ENDPOINT": "inproc", "KV_CANARY_PERTURB_LIMIT": "12"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["steps"] == 200
    ledger = summary["injections"]
    assert ledger.keys() == {"next_token_swap", "real_kv_used"}
    assert sum(tally["injected"] for tally in ledger.values()) == 12
    for tally in ledger.values():
        assert tally["detected"] + tally["masked"] == tally["injected"] > 0
        assert (tally["missed"], tally["open"]) == (0, 0)
    assert any("the limit of 12 injections is reached" in tally["skipped"] for tally in ledger.values())
    found = summary["violations_by_reason"]
    assert found.keys() <= {"write_token", "token", "chain", "kv_data"}
    assert {"write_token", "kv_data"} <= found.keys()
    assert sum(found.values()) == summary["violations"]
    assert (summary["state"], summary["observer_faults"]) == ("violated", {})
    lines = done.stderr.splitlines()
    assert sum(": fault injected: mode=" in line for line in lines) == 12
    assert any("no fault injected: mode=" in line for line in lines)


def test_a_group_must_be_named_where_there_are_several(make_rig: Any, caplog: Any) -> None:
    """vLLM runs on, unprotected; the log lists the groups."""
    rig = make_rig("gemma3", canary={"perturb": "real_kv_used=1", "perturb_enabled": "true"})
    assert runtime_of(rig.worker) is None
    (line,) = (line for line in caplog.messages if "is not protected" in line)
    assert "KV_CANARY_PERTURB_GROUP='': the engine has 3 groups" in line
    assert "Groups are: swa, swa2, full." in line
    assert not any(record.exc_info for record in caplog.records)
    assert len(rig.generate([[5, 6, 7]], 4)[0]) == 4
