"""Prefill and decode apart: records arrive with the KV, and damage is found where it would be read."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.engines.sglang.real.separated import TOKENS, Outcome, Plan, prompts_of

_ROOT = Path(__file__).parents[4]
ROLES = ("prefill", "decode")


def _pair(folder: Path, plan: Plan, environment: dict[str, str]) -> dict[str, Outcome]:
    """Both processes to their ends: what each says."""
    given = folder / "plan.json"
    given.write_bytes(msgspec.json.encode(plan))
    command = [sys.executable, "-W", "ignore", "-m", "tests.engines.sglang.real.separated"]
    logs = {role: (folder / f"{role}.log").open("w") for role in ROLES}
    processes = [
        subprocess.Popen(
            [*command, role, str(given)], cwd=_ROOT, stdout=log, stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONPATH": str(_ROOT)} | environment,
        )
        for role, log in logs.items()
    ]  # fmt: skip
    try:
        _wait(processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for log in logs.values():
            log.close()
    failed = {role: (folder / f"{role}.log").read_text("utf-8")[-3000:] for role in ROLES}
    assert [process.returncode for process in processes] == [0, 0], failed
    return {role: msgspec.json.decode((folder / f"{role}.json").read_bytes(), type=Outcome) for role in ROLES}


def _wait(processes: list[subprocess.Popen[bytes]]) -> None:
    """Until both have ended, or one of them has failed: the other would wait for it."""
    for process in itertools.islice(itertools.cycle(processes), 280):
        codes = [other.poll() for other in processes]
        if any(codes) or None not in codes:
            return
        try:
            process.wait(1)
        except subprocess.TimeoutExpired:
            continue


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@pytest.mark.parametrize(("model", "page"), [("llama", 1), ("windows", 16)])
def test_a_slot_that_was_damaged_before_it_was_sent(
    models: Callable[[str], Path], make_rig: Callable[..., Any], tmp_path: Path, model: str, page: int
) -> None:
    groups = ["full", "swa"] if model == "windows" else ["full"]
    plan = Plan(
        model=str(models(model)), port=_free_port(), folder=str(tmp_path), damaged=groups,
        settings={"page_size": page},
    )  # fmt: skip
    found = _pair(tmp_path, plan, {})
    prefill, decode = found["prefill"], found["decode"]
    for outcome in found.values():
        assert outcome.sound == []
        assert outcome.sound_state == ["ok"]
    assert decode.compared > 500
    assert decode.without == 0
    alone = make_rig(model, page_size=page).generate(prompts_of(plan), TOKENS)
    assert {name: decode.answers[name] for name in alone} == alone

    assert {item.group for item in decode.violations} == set(groups)
    first = {item.group: item for item in reversed(decode.violations)}
    for group, item in first.items():
        assert (item.phase, item.reason, item.part) == ("head", "kv_data", "k")
        assert (item.request, item.position) == prefill.damaged[group]
        assert item.peer == f"127.0.0.1:{plan.port}"
    assert {(item.group, item.reason, item.slot) for item in decode.violations} == {
        (group, "kv_data", item.slot) for group, item in first.items()
    }, "one slot of each, and found again"
    assert decode.state[0] == "violated"
