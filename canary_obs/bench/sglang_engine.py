"""One engine of `canary-obs bench sglang-gpu`, in processes of its own as in production.

Arguments: a JSON object with the engine's settings, and the descriptors to read requests from and to write
answers to, a line each. A request is the JSON list [load, seed], `["flips", seed]`, `["report", 0]`, or
`["attach", seed]` and `["detach", seed]`, after which every slot is written once; an answer is an object.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from canary_obs.bench.sglang_loads import LOADS, SglangEngine, SglangLoads, run_load
from canary_obs.bench.sglang_taps import METHOD
from canary_obs.demo.in_process_vllm import LLAMA, SHAPES

_GPU: dict[str, Any] = {
    "attention_backend": "fa3", "dtype": "bfloat16", "mem_fraction_static": 0.9,
    "disable_prefill_cuda_graph": True,
}  # fmt: skip
_CPU: dict[str, Any] = {
    "device": "cpu", "attention_backend": "torch_native", "dtype": "float32", "mem_fraction_static": 0.2,
    "disable_cuda_graph": True, "disable_overlap_schedule": False,
}  # fmt: skip
CHAIN: dict[str, Any] = {  # how far a draft model drafts
    "speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4,
}  # fmt: skip
_ALL: dict[str, Any] = {
    "load_format": "dummy", "skip_tokenizer_init": True, "sampling_backend": "pytorch", "random_seed": 1,
    "grammar_backend": "none", "log_level": "warning",
}  # fmt: skip


def main(settings: dict[str, Any], requests: int, answers: int) -> None:
    """Start, say so, and answer requests until there are no more."""
    loads = SglangLoads(**settings["loads"])
    with TemporaryDirectory() as folder, os.fdopen(requests) as lines, os.fdopen(answers, "w") as out:
        engine = _start(Path(folder), settings, loads)
        print(json.dumps({"engine": engine.ask_scheduler("facts")}), file=out, flush=True)
        for line in _requests(engine, lines):
            name, seed = json.loads(line)
            if name in LOADS:
                answer = run_load(name, engine, loads, seed)
            elif name in ("attach", "detach"):
                engine.flush()
                answer = engine.ask_scheduler(name)
                engine.fill(settings["tokens"], loads, seed)
            else:
                answer = engine.ask_scheduler(name, seed)
            print(json.dumps(answer), file=out, flush=True)
        engine.shutdown()


def _requests(engine: SglangEngine, lines: Iterator[str]) -> Iterator[str]:
    """The lines. While it waits for one, its canary does nothing on the device."""
    while True:
        engine.ask_scheduler("pause")
        line = next(lines, None)
        # The seed is the round's: its engines run on one core.
        engine.ask_scheduler("resume", 0 if line is None else json.loads(line)[1])
        if line is None:
            return
        yield line


def engine_settings(*, on_gpu: bool) -> dict[str, Any]:
    """Arguments of SGLang's engine that do not depend on the loads."""
    return _ALL | (_GPU if on_gpu else _CPU)


def _start(folder: Path, settings: dict[str, Any], loads: SglangLoads) -> SglangEngine:
    from sglang.srt.entrypoints.engine import Engine

    on_gpu = torch.cuda.is_available()
    shape = SHAPES[settings["shape"]]
    (folder / "config.json").write_text(json.dumps(LLAMA | shape), "utf-8")
    longest = max(loads.context, loads.few_context) + loads.steps + 32
    given = engine_settings(on_gpu=on_gpu)
    if on_gpu:
        given["cuda_graph_bs_decode"] = sorted({1, loads.few, loads.requests})
    running = loads.requests
    if "full_attention_interval" in shape:
        # A running request has three states, and the prefix cache others. Of n, SGLang 0.5.16 ran n - 1.
        given["max_mamba_cache_size"], running = 12 * loads.requests, loads.requests + 1
    if settings["drafts"]:
        draft = folder / "draft"
        draft.mkdir()
        (draft / "config.json").write_text(json.dumps(LLAMA | shape | {"num_hidden_layers": 1}), "utf-8")
        given |= CHAIN | {
            "speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(draft)
        }  # fmt: skip
    engine = Engine(
        model_path=str(folder), max_total_tokens=settings["tokens"], max_running_requests=running,
        context_length=max(longest, loads.prefill + 32), chunked_prefill_size=loads.prefill,
        **(given | settings["more"]),
    )  # fmt: skip
    answer_file = folder / "answer.json"

    def ask_scheduler(what: str, seed: int = 0) -> Any:
        engine.collective_rpc(METHOD, what=what, path=str(answer_file), seed=seed)
        return json.loads(answer_file.read_text("utf-8"))

    return SglangEngine(engine, ask_scheduler, shape["vocab_size"])


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
