"""Prefill and decode apart: records arrive with the KV, and damage is found where it would be read."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.engines.sglang.real.separated import Outcome, Plan

_ROOT = Path(__file__).parents[4]
pytestmark = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="NIXL is not installed here")


@pytest.fixture
def run(models: Callable[[str], Path], tmp_path: Path) -> Callable[..., dict[str, Outcome]]:
    """Both processes to their ends: what each says."""

    def run(model: str, records: bool = True, **plan: Any) -> dict[str, Outcome]:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        given = tmp_path / "plan.json"
        given.write_bytes(
            msgspec.json.encode(Plan(model=str(models(model)), port=port, folder=str(tmp_path), **plan))
        )
        environment = os.environ | {
            "PYTHONPATH": str(_ROOT), "KV_CANARY_TRANSFER_RECORDS": "true" if records else "false",
        }  # fmt: skip
        command = [sys.executable, "-W", "ignore", "-m", "tests.engines.sglang.real.separated"]
        logs = {role: (tmp_path / f"{role}.log").open("w") for role in ("prefill", "decode")}
        processes = {
            role: subprocess.Popen(
                [*command, role, str(given)], cwd=_ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT
            )
            for role, log in logs.items()
        }
        try:
            codes = {role: process.wait(280) for role, process in processes.items()}
        finally:
            for process in processes.values():
                process.kill()
            for log in logs.values():
                log.close()
        assert not any(codes.values()), {
            role: (tmp_path / f"{role}.log").read_text()[-3000:] for role in codes
        }
        return {
            role: msgspec.json.decode((tmp_path / f"{role}.json").read_bytes(), type=Outcome)
            for role in processes
        }

    return run


@pytest.mark.parametrize(("model", "page"), [("llama", 1), ("windows", 16), ("latent", 16)])
def test_a_slot_that_was_damaged_before_it_was_sent(run: Any, model: str, page: int) -> None:
    groups = ["full", "swa"] if model == "windows" else ["full"]
    found = run(model, damaged=groups, settings={"page_size": page})
    prefill, decode = found["prefill"], found["decode"]
    assert decode.compared > 300
    assert decode.without == 0
    heads = [item for item in decode.violations if item[2] == "head"]
    assert {(group, reason) for group, reason, _, _ in heads} == {(group, "kv_data") for group in groups}
    assert len({item[:2] + item[3:] for item in decode.violations}) == len(groups), "one slot of each"
    assert set(prefill.damaged) == set(groups)
    assert decode.state[0] == "violated"


def test_a_sound_pair(run: Any) -> None:
    found = run("windows")
    for outcome in found.values():
        assert outcome.violations == []
        assert outcome.state == ["ok"]
    assert found["decode"].compared > 300
    assert found["decode"].without == 0
