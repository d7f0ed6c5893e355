"""One engine of `canary-obs bench vllm-load`, in a process of its own as in production.

Arguments: a JSON object with the engine's settings, and the descriptors to read requests from and to write
answers to, a line each. A request is the JSON list [workload, seed], `["flips", seed]` or `["report", 0]`; an
answer is an object.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from canary_obs.bench.vllm_flips import flip_everywhere, incomplete
from canary_obs.bench.vllm_workloads import LoadPlan, fill_pool, run_workload
from canary_obs.demo.in_process_vllm import InProcessVllm
from canary_obs.engines.vllm.worker import attached_adapter, runtime_of
from canary_obs.runtime.report.snapshot import group_counters

_BLOCK_SIZE = {"cuda": 16, "cpu": 32}
_FILLS = 2  # so that every block holds records of an earlier request


def main(settings: dict[str, Any], requests: int, answers: int) -> None:
    """Start, say so, and answer requests until there are no more."""
    load = LoadPlan(**settings["load"])
    with TemporaryDirectory() as folder, os.fdopen(requests) as lines, os.fdopen(answers, "w") as out:
        vllm = _start(Path(folder), settings, load)
        written = fill_pool(vllm, load, _FILLS)
        print(json.dumps({"engine": vllm.description(), "tokens_before": written}), file=out, flush=True)
        for line in lines:
            name, seed = json.loads(line)
            if name == "flips":
                answer = _flips(vllm, load, seed)
            elif name == "report":
                answer = _report(vllm)
            else:
                before, started = _hooks(vllm), time.perf_counter()
                seconds = run_workload(name, vllm, load, seed)
                passed = time.perf_counter() - started  # with what is not timed: filling contexts, aborts
                spent = {
                    hook: (after - before.get(hook, 0.0)) / passed for hook, after in _hooks(vllm).items()
                }
                answer = {"seconds": seconds, "host_share": spent}
            print(json.dumps(answer), file=out, flush=True)
        vllm.shutdown()


def _start(folder: Path, settings: dict[str, Any], load: LoadPlan) -> InProcessVllm:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    longest = load.context + load.steps + 2 * load.requests + 32
    block_size = _BLOCK_SIZE[device]
    # All requests of `decode` with the steps that they may run, and a long prompt.
    pool = int(1.1 * load.requests * longest) + load.prefill
    return InProcessVllm(
        folder, settings["shape"], settings["seed"], enable_prefix_caching=True, max_num_seqs=load.requests,
        max_model_len=max(longest, load.prefill + 32), max_num_batched_tokens=load.prefill,
        gpu_memory_utilization=settings["memory"], block_size=block_size,
        num_gpu_blocks_override=pool // block_size + 1,
    )  # fmt: skip


def _hooks(vllm: InProcessVllm) -> dict[str, float]:
    """Seconds of each hook since the start; empty without a canary."""
    canary = runtime_of(vllm.worker)
    return {} if canary is None else dict(canary.overhead)


def _report(vllm: InProcessVllm) -> dict[str, Any]:
    """What the canary of this engine checked and found; empty without one."""
    canary = runtime_of(vllm.worker)
    if canary is None:
        return {}
    vllm.synchronize()
    adapter = attached_adapter(vllm.worker)
    with adapter.paused():
        canary.check_everything()
        canary.delivery.drain(5.0)
    counters = group_counters(canary.state, canary.counter_reader)
    state, reasons = canary.verdict()
    return {
        "violations": canary.counter_reader.violations,
        "observer_faults": canary.health.faults.total(),
        "state": [state.value, *reasons],
        "verified": sum(sum(group.verified.values()) for group in counters.values()),
        "hashed": {
            phase.value: sum(group.hashed[phase] for group in counters.values())
            for phase in next(iter(counters.values())).hashed
        },
    }


def _flips(vllm: InProcessVllm, load: LoadPlan, seed: int) -> dict[str, Any]:
    canary, adapter = runtime_of(vllm.worker), attached_adapter(vllm.worker)
    assert canary is not None, "only the protected engine is asked"
    counts = flip_everywhere(vllm, canary, adapter, min(load.context, 1024), seed)
    return {"counts": counts, "incomplete": incomplete(counts)}


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
