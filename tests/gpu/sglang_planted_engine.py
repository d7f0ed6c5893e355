"""One engine of `tests.gpu.sglang_differential`, in processes of its own as in production.

A request is the JSON list [fault, cached]; the answer is what both canaries said.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from canary_obs.bench.sglang_engine import engine_settings
from canary_obs.demo.in_process_vllm import LLAMA, SHAPES
from tests.engines.sglang.real.sglang_canary import SETTINGS
from tests.engines.sglang.real.traffic import prompts
from tests.gpu.sglang_planting import METHOD

_TOKENS = 24  # of each answer: more than are decoded before a fault, and after it
_EMPTYING = 50  # turns of the loop within which an engine is idle


class PlantedEngine:
    """Traffic of one engine, and commands to its scheduler."""

    def __init__(self, folder: Path, shape: str) -> None:
        from sglang.srt.entrypoints.engine import Engine

        on_gpu = torch.cuda.is_available()
        (folder / "config.json").write_text(json.dumps(LLAMA | SHAPES[shape]), "utf-8")
        given = engine_settings(on_gpu=on_gpu) | SETTINGS
        if on_gpu:
            given["cuda_graph_bs_decode"] = [1, 2, 3, 4]
        self._engine = Engine(
            model_path=str(folder), max_running_requests=8, chunked_prefill_size=1024, context_length=1024,
            **given,
        )  # fmt: skip
        self._answer = folder / "answer.json"

    def ask(self, what: str, fault: str = "") -> dict[str, Any]:
        """A command of `tests.gpu.sglang_planting`."""
        self._engine.collective_rpc(METHOD, what=what, path=str(self._answer), fault=fault)
        found: dict[str, Any] = json.loads(self._answer.read_text("utf-8"))
        return found

    def outcome(self, fault: str, *, cached: bool) -> dict[str, Any]:
        """Plant it in traffic that nothing else damaged."""
        for _ in range(_EMPTYING):
            if self.ask("renew")["emptied"]:
                break
        else:
            return {"outcome": None}
        if cached:
            self._generate(list(prompts(3).values()))
        self.ask("arm", fault)
        self._generate(list((prompts(2, seed=9) if cached else prompts(3)).values()))
        return self.ask("outcome")

    def shutdown(self) -> None:
        """End the engine's processes."""
        self._engine.shutdown()

    def _generate(self, given: list[list[int]]) -> None:
        sampling = {"max_new_tokens": _TOKENS, "temperature": 0, "ignore_eos": True}
        self._engine.generate(input_ids=given, sampling_params=[dict(sampling) for _ in given])


def main(settings: dict[str, Any], requests: int, answers: int) -> None:
    """Start, say so, and answer requests until there are no more."""
    with TemporaryDirectory() as folder, os.fdopen(requests) as lines, os.fdopen(answers, "w") as out:
        engine = PlantedEngine(Path(folder), settings["shape"])
        print(json.dumps(engine.ask("start")), file=out, flush=True)
        for line in lines:
            fault, cached = json.loads(line)
            print(json.dumps(engine.outcome(fault, cached=bool(cached))), file=out, flush=True)
        engine.shutdown()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
