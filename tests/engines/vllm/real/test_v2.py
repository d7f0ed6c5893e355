"""The V2 model runner on a CPU through Triton's interpreter, each engine in its own process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ENGINE = {"max_num_seqs": 8, "max_model_len": 512, "num_gpu_blocks_override": 200}


def run(model: Path, folder: Path, mode: str, engine: dict[str, Any], prompts: int = 8) -> dict[str, Any]:
    result = folder / f"{mode}.json"
    command = [sys.executable, "-m", "tests.engines.vllm.real.interpreted"]
    settings = {"KV_CANARY_MODE": mode, "KV_CANARY_SWA_DIVERGENCE_INTERVAL": "1"}
    subprocess.run(
        [*command, str(model), str(result), json.dumps(engine), str(prompts)],
        env=os.environ | settings, check=True, timeout=280, capture_output=True,
    )  # fmt: skip
    told: dict[str, Any] = json.loads(result.read_text())
    return told


@pytest.mark.parametrize(("model", "groups"), [("llama", ["full"]), ("gemma3", ["swa", "swa2", "full"])])
def test_clean_and_two_faults(models: Any, tmp_path: Path, model: str, groups: list[str]) -> None:
    told = run(models(model), tmp_path, "log", ENGINE)
    assert told["runner"] == "vllm.v1.worker.cpu.model_runner"
    assert told["clean"] == []
    assert told["state"] == ["ok", "()"]
    assert told["groups"] == groups
    assert told["checks"] > 20_000
    assert told["swept"] > 0
    assert told["zeroed"] == ["kv_data"]
    assert "token" in told["exchanged"]
    assert ("windows" in told) is ("swa" in groups)
    if windows := told.get("windows"):
        assert windows["reported"]["step"] == windows["step"]
        assert (windows["reported"]["swa_groups"], windows["reported"]["full_groups"]) == (
            ["swa", "swa2"],
            ["full"],
        )
        counts = [windows["reported"][name] for name in ("out_of_window", "index_divergence")]
        assert counts == windows["scheduled"]
        assert min(counts) >= 1
        assert 0 < windows["reported"]["verified_swa"] < windows["reported"]["verified_full"]
    assert run(models(model), tmp_path, "none", ENGINE)["answers"] == told["answers"]


@pytest.mark.parametrize(("method", "draft"), [("draft_model", "llama_near"), ("eagle", "llama_eagle")])
def test_draft_layers(models: Any, tmp_path: Path, method: str, draft: str) -> None:
    """Captured graphs apart, drafting is what it is on a GPU: all its state lies on the device."""
    speculation = {"method": method, "model": str(models(draft)), "num_speculative_tokens": 2}
    engine = ENGINE | {"speculative_config": speculation}
    told = run(models("llama"), tmp_path, "log", engine, prompts=3)
    assert told["clean"] == []
    assert told["state"] == ["ok", "()"]
    assert told["groups"] == ["full", "draft"]
    assert told["sampled"] >= 2
    assert told["checks"] > 10_000
    assert told["draft_zeroed"] == ["kv_data"]
    assert "token" in told["exchanged"]
    assert run(models("llama"), tmp_path, "none", engine, prompts=3)["answers"] == told["answers"]
