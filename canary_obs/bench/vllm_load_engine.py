"""One engine of `canary-obs bench vllm-load`, in a process of its own as in production.

Arguments: a JSON object with the engine's settings, and the descriptors to read requests from and to write
answers to, a line each. A request is the JSON list [load, seed], `["flips", seed]` or `["report", 0]`; an
answer is an object. While the engine waits for a request its canary does nothing on the device, where another
engine is measured meanwhile.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TextIO

import torch

from canary_obs.bench.canary_counts import canary_counts
from canary_obs.bench.kernel_clock import KernelClock
from canary_obs.bench.launch_speed import launch_as_alone
from canary_obs.bench.shared_core import take_core
from canary_obs.bench.step_log import Clocks
from canary_obs.bench.vllm_flips import flip_everywhere, incomplete
from canary_obs.bench.vllm_workloads import (
    BATCH_CONTEXT,
    FIRST_TOKEN_PROMPT,
    LoadedVllm,
    LoadPlan,
    busy_length,
    fill_pool,
    run_workload,
)
from canary_obs.demo.in_process_vllm import SHAPES, InProcessVllm, keeps_states
from canary_obs.engines.vllm.worker import attached_adapter, runtime_of
from canary_obs.errors import UnsupportedEngine

_BLOCK_SIZE = {"cuda": 16, "cpu": 32}
_FILLS = 2  # so that every block holds records of an earlier request
# Of states and attention together.
_POOL_BYTES = 6 << 30  # on a GPU: some 900 blocks of Qwen3-Next's
_CPU_BLOCKS = 96
_TWO_BLOCKS = 4096  # tokens: as many as two blocks have, or more


def main(settings: dict[str, Any], requests: int, answers: int) -> None:
    """Start, say so, and answer requests until there are no more."""
    load = LoadPlan(**settings["load"])
    with TemporaryDirectory() as folder, os.fdopen(requests) as lines, os.fdopen(answers, "w") as out:
        vllm = _start(Path(folder), settings, load)
        check_protected(runtime_of(vllm.worker))
        written = fill_pool(vllm, load, _FILLS)
        engine = LoadedVllm(vllm=vllm, clocks=_clocks(vllm, kernels_apart=settings["kernels_apart"]))
        answer: dict[str, Any] = {"engine": vllm.description(), "tokens_before": written}
        while (line := _exchange(vllm, answer, lines, out)) is not None:
            name, seed = json.loads(line)
            if name == "flips":
                answer = _flips(vllm, load, seed)
            elif name == "report":
                answer = _report(vllm)
            else:
                answer = run_workload(name, engine, load, seed)
        vllm.shutdown()


def check_protected(canary: object) -> None:
    """Raises UnsupportedEngine where KV_CANARY_MODE asks for a canary and the engine has none."""
    mode = os.environ.get("KV_CANARY_MODE", "none")
    if mode != "none" and canary is None:
        raise UnsupportedEngine(
            f"KV_CANARY_MODE={mode}, but this vLLM has no canary: its log says why, or it found no plugin. "
            "Install the package (pip install .), which registers vllm.general_plugins"
        )


def _exchange(vllm: InProcessVllm, answer: dict[str, Any], lines: Iterator[str], out: TextIO) -> str | None:
    """Give an answer, and wait for the next request; None = there are no more.

    The next engine begins with the answer: nothing that this one launched may run then, or after.
    """
    canary = runtime_of(vllm.worker)
    with nullcontext() if canary is None else attached_adapter(vllm.worker).paused():
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        print(json.dumps(answer), file=out, flush=True)
        line = next(lines, None)
    if line is not None:
        launch_as_alone()
        take_core(json.loads(line)[1])  # the seed is the round's: its engines run on one core
    return line


def _start(folder: Path, settings: dict[str, Any], load: LoadPlan) -> InProcessVllm:
    on_gpu = torch.cuda.is_available()
    block_size = _BLOCK_SIZE["cuda" if on_gpu else "cpu"]
    together = [(load.requests, load.context), *((count, BATCH_CONTEXT) for count in settings["batches"])]
    # All requests of a load with the steps that they may run, and a long prompt.
    decoding = max(count * load.decoding_length(count, context) for count, context in together)
    tokens = int(1.1 * max(decoding, (load.busy + 1) * busy_length(load))) + load.prefill
    blocks = tokens // block_size + 1
    longest = max(
        *(context + load.steps + 2 * count + 32 for count, context in together),
        busy_length(load), FIRST_TOKEN_PROMPT + 32, load.prefill + 32,
    )  # fmt: skip
    shape = SHAPES[settings["shape"]]
    block_bytes = (
        block_size * 4 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]
    )
    pool: dict[str, Any] = {"block_size": block_size, "num_gpu_blocks_override": blocks}
    # With it vLLM measures no memory, which would fail while another engine starts on the same GPU.
    measured = (blocks + 1) * block_bytes
    if keeps_states(settings["shape"]):  # vLLM chooses blocks as large as a state: their bytes decide
        pool, measured = {} if on_gpu else {"num_gpu_blocks_override": _CPU_BLOCKS}, _POOL_BYTES
        longest = max(longest, _TWO_BLOCKS)
    if on_gpu:
        pool["kv_cache_memory_bytes"] = measured
    return InProcessVllm(
        folder, settings["shape"], settings["seed"], enable_prefix_caching=True,
        max_num_seqs=max(load.requests, load.busy + 1, *settings["batches"]), max_model_len=longest,
        max_num_batched_tokens=load.prefill, gpu_memory_utilization=settings["memory"], **pool,
    )  # fmt: skip


def _clocks(vllm: InProcessVllm, *, kernels_apart: bool) -> Clocks:
    """Reads the seconds of each hook since the start; none without a canary."""
    canary = runtime_of(vllm.worker)
    if canary is None:
        return dict
    if kernels_apart and not torch.cuda.is_available():
        return KernelClock(canary).read
    return lambda: canary.overhead


def _report(vllm: InProcessVllm) -> dict[str, Any]:
    """What the canary of this engine checked and found; empty without one."""
    canary = runtime_of(vllm.worker)
    if canary is None:
        return {}
    vllm.synchronize()
    adapter = attached_adapter(vllm.worker)
    with adapter.paused():
        canary.check_everything()
        return canary_counts(canary)


def _flips(vllm: InProcessVllm, load: LoadPlan, seed: int) -> dict[str, Any]:
    canary, adapter = runtime_of(vllm.worker), attached_adapter(vllm.worker)
    assert canary is not None, "only the protected engine is asked"
    # Of large blocks, a prompt that fills two: what is flipped is a block that no step writes any more.
    prompt = max(min(load.context, 1024), 2 * vllm.layer_caches()[0].shape[2] + 1)
    counts = flip_everywhere(vllm, canary, adapter, prompt, seed)
    return {"counts": counts, "incomplete": incomplete(counts)}


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
