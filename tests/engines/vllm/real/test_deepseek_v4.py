"""DeepSeek-V4 in vLLM: its windows are protected, and what is not is named with its share."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

from tests.engines.vllm.real.server import Process

SECONDS = 240.0
FOUND = importlib.util.find_spec("vllm")
KEPT = FOUND is not None and Path(str(FOUND.origin)).with_name("models").joinpath("deepseek_v4/cpu").exists()


@pytest.mark.timeout(SECONDS + 20)
@pytest.mark.skipif(
    not (KEPT and torch.cpu._is_avx512_bf16_supported()),
    reason="vLLM's kernels of it need AVX512 with bfloat16",
)
def test_windows_are_protected_and_the_rest_is_named(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    program = [sys.executable, "-m", "tests.engines.vllm.real.deepseek_v4", str(tmp_path), str(results)]
    process = Process(program, {}, tmp_path / "log")
    try:
        ended = process.wait(SECONDS)
    finally:
        process.stop()
    assert ended == 0, process.log.read_text()[-8000:]
    got = json.loads(results.read_text())
    assert got["groups"] == {"swa": 128, "swa2": 128, "swa3": 128}
    assert got["clean"] == []
    assert got["checks"] > 5000
    assert got["coverage"] == pytest.approx(0.4816, abs=1e-3)
    share, *left_out = got["verdict"]
    assert share.startswith("48.2% of KV bytes protected")
    assert ["entry per 4, 128" in text or "buffer of a compressor" in text for text in left_out] == [True] * 3
    assert got["found"] == [[["swa2", 5, "kv_data"]]] * 2
