"""DeepSeek-V4 in vLLM, with its own model, caches and attention on a CPU."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

from tests.engines.vllm.real.server import Process

SECONDS = 900
FOUND = importlib.util.find_spec("vllm")
KEPT = FOUND is not None and Path(str(FOUND.origin)).with_name("models").joinpath("deepseek_v4/cpu").exists()


@pytest.mark.timeout(SECONDS + 20)
@pytest.mark.skipif(
    not (KEPT and torch.cpu._is_avx512_bf16_supported()),
    reason="vLLM's kernels of it need AVX512 with bfloat16",
)
def test_every_cache_is_protected_and_damage_in_each_is_found(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    program = [sys.executable, "-m", "tests.engines.vllm.real.deepseek_v4", str(tmp_path), str(results)]
    process = Process(program, {}, tmp_path / "log")
    try:
        ended = process.wait(SECONDS)
    finally:
        process.stop()
    assert ended == 0, process.log.read_text()[-8000:]
    got = json.loads(results.read_text())
    entries, states = {"c4": None, "c4_indexer": None, "c128": None}, {"c4_state": 8, "c4_indexer_state": 8}
    assert got["groups"] == {"swa": 128, "swa2": 128, "swa3": 128, "c128_state": 128} | entries | states
    assert got["clean"] == []
    assert got["checks"] > 5000
    assert got["preempted"] > 0
    assert got["coverage"] == 1
    assert got["verdict"] == []
    assert min(got["verified"].values()) > 0, got["verified"]
    assert min(got["hits"].values()) > 0, got["hits"]
    assert set(got["compared"].values()) == {None}
    assert got["plain"] == {"answers": got["answers"], "preempted": got["preempted"]}
    packed = {"swa", "swa2", "swa3", *entries}
    for name, found in got["found"].items():
        assert found == [[f"{name} 0 kv_data"]] * (2 if name in packed else 1)
