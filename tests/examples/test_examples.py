"""The examples run as their first lines say."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from canary_obs.attach import install_canary
from canary_obs.config import IN_PROCESS, CanaryConfig
from canary_obs.vocabulary import Mode

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
MOST_LINES = 66  # of code, to attach to an engine of one's own


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    return subprocess.run(
        [sys.executable, *arguments], cwd=EXAMPLES, env={**os.environ, "PYTHONPATH": paths},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def test_an_own_engine_is_protected() -> None:
    done = run("own_engine.py")
    assert done.returncode == 1
    assert "KVCacheViolation" in done.stderr
    assert "reason=kv_data" in done.stderr
    assert "group=full, part=k, slot=2, position=2, request=a" in done.stderr


def test_an_own_engine_without_a_fault_has_no_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    example = importlib.import_module("own_engine")
    engine = example.ToyEngine()
    config = CanaryConfig(mode=Mode.RAISE, endpoint=IN_PROCESS, coverage_target=1.0)
    canary = install_canary(example.ToyAdapter(engine), config)
    canary.mark_ready()
    for _ in range(20):
        engine.step()
    canary.check_everything()
    assert not canary.verdict()[1], canary.verdict()
    final = canary.detach()
    full = final.groups["full"]
    assert full.written == full.completed == sum(engine.computed), full
    assert min(full.verified["head"], full.verified["sweep"], full.hashed["sweep"]) > 0, full
    assert not any(sum(found.values()) for found in full.violations.values()), full
    assert not {"forward", "step"} & vars(engine).keys()


@pytest.mark.parametrize("part", ["own_engine.py", "toy_engine.py"])
def test_an_adapter_is_short(part: str) -> None:
    lines = [line for line in (EXAMPLES / part).read_text().splitlines() if line.strip()]
    assert len(lines) <= MOST_LINES


def test_an_incident_is_read() -> None:
    done = run("read_incident.py", "incident.json")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "20261123T052146Z-89d623: 1 violation on reference/default",
        "  kv_data found by patrol in step 23: group full, slot 158",
        "  slot 158, now used by r000004:",
        "    k, layer 1, head 1, element 7 was 0x4012f3cd, is 0x4052f3cd",
        "    written in step 7 by r000000, r000002, r000003, r000004",
    ]
