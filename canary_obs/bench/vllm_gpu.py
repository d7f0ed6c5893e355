"""`canary-obs bench vllm-gpu`: throughput of a real vLLM with the canary at its defaults against none."""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from canary_obs.bench.environment import environment
from canary_obs.bench.result import BenchResult
from canary_obs.bench.statistics import overhead_measure, paired_overhead
from canary_obs.bench.vllm_canary import attached, detach, find_device_waits
from canary_obs.bench.vllm_flips import flip_everywhere, incomplete
from canary_obs.demo.in_process_vllm import InProcessVllm
from canary_obs.runtime.report.snapshot import group_counters

GOAL = 0.005  # of the time without a canary
_PARTS = "prefill", "fill", "decode"
# Figures of the last protected block.
_OF_LAST_BLOCK = (
    "attach",
    "decode_host_us",
    "prefill_host_us",
    "hashed",
)
_BLOCK_SIZE = {"cuda": 16, "cpu": 32}


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmGpuPlan:
    """The engine, its load, and the number of pairs of blocks."""

    shape: str
    runner: str  # v1, v2
    requests: int
    context: int  # tokens of each request
    steps: int  # decode steps per block
    prefill: int  # tokens of one prefill step
    prefills: int  # per block
    pairs: int
    memory: float  # share of the GPU's memory that vLLM may use
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """One block's seconds, and what its canary counted."""

    seconds: dict[str, float]  # prefill: all single prefills; fill: all requests' contexts; decode
    prefills: list[float]  # seconds of each single prefill
    attach: float = 0.0  # seconds
    violations: int = 0
    faults: int = 0
    decode_host_us: dict[str, float] | None = None  # per decode step, by hook
    prefill_host_us: dict[str, float] | None = None  # per prefill, by hook
    hashed: dict[str, int] | None = None  # slots, by phase
    verified: int = 0


def run_vllm_gpu(plan: VllmGpuPlan, on_progress: Callable[[dict[str, Any]], None]) -> BenchResult:
    """Interleave blocks on one engine, each from an empty prefix cache; then flip bits and check for waits.

    `on_progress` receives the figures so far, marked `unfinished`, after each pair.
    """
    os.environ |= {
        "KV_CANARY_MODE": "log",
        "VLLM_USE_V2_MODEL_RUNNER": "1" if plan.runner == "v2" else "0",
    }
    figures: dict[str, Any] = {"bench": "vllm-gpu", "plan": asdict(plan), "environment": environment()}
    with TemporaryDirectory() as folder:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        vllm = InProcessVllm(
            Path(folder), plan.shape, plan.seed, enable_prefix_caching=True, max_num_seqs=plan.requests,
            max_model_len=max(plan.context + plan.steps + 2 * plan.requests + 16, plan.prefill + 16),
            max_num_batched_tokens=plan.prefill, gpu_memory_utilization=plan.memory,
            block_size=_BLOCK_SIZE[device],
        )  # fmt: skip
        detach(vllm)
        figures["engine"] = vllm.description()
        for blocks in _pairs(vllm, plan):
            figures |= _ratios(blocks, plan)
            on_progress(figures | {"unfinished": f"{len(blocks)} of {plan.pairs} pairs, no flips"})
        with attached(vllm) as (canary, adapter):
            figures["flips"] = flip_everywhere(vllm, canary, adapter, plan.context, plan.seed)
            figures["syncs"] = find_device_waits(vllm, canary, adapter)
            figures["faults"] += canary.health.faults.total()
            figures["state"] = [canary.verdict()[0].value, *canary.verdict()[1]]
        vllm.shutdown()
    return BenchResult(
        bench="vllm-gpu",
        title="vLLM with the canary at its defaults against none",
        plan=asdict(plan),
        figures=figures,
        faults={
            "violations": figures["violations"],
            "observer_faults": figures["faults"],
            "waits_for_the_device": figures["syncs"].get("waits"),
            "flips": incomplete(figures["flips"]),
        },
        measures={
            f"{part}: overhead": overhead_measure(
                paired_overhead(figures[part]["seconds"], 1, plan.seed), GOAL
            )
            for part in _PARTS
        },
    )


def _pairs(vllm: InProcessVllm, plan: VllmGpuPlan) -> Iterator[list[dict[bool, _Block]]]:
    """Yield the pairs so far after each of them; the first one warms up and is left out."""
    draw = random.Random(plan.seed)
    pairs: list[dict[bool, _Block]] = []
    for number in range(plan.pairs + 1):
        order = (False, True) if draw.random() < 0.5 else (True, False)
        pair = {protected: _block(vllm, plan, protected=protected) for protected in order}
        if number:
            pairs.append(pair)
            yield pairs


def _block(vllm: InProcessVllm, plan: VllmGpuPlan, *, protected: bool) -> _Block:
    vllm.core.reset_prefix_cache()
    if not protected:
        seconds, prefills = _timed(vllm, plan, lambda: None)
        return _Block(seconds=seconds, prefills=prefills)
    started = time.perf_counter()
    with attached(vllm) as (canary, adapter):
        attach = time.perf_counter() - started
        marks: list[dict[str, float]] = []
        seconds, prefills = _timed(vllm, plan, lambda: marks.append(dict(canary.overhead)))
        vllm.synchronize()
        with adapter.paused():
            canary.check_everything()
        counters = group_counters(canary.state, canary.counter_reader)
        return _Block(
            seconds=seconds,
            prefills=prefills,
            attach=attach,
            violations=canary.counter_reader.violations,
            faults=sum(canary.health.faults.values()),
            decode_host_us=_hook_us(marks[2], marks[3], plan.steps),
            prefill_host_us=_hook_us(marks[0], marks[1], plan.prefills),
            verified=sum(sum(group.verified.values()) for group in counters.values()),
            hashed={
                phase.value: sum(group.hashed[phase] for group in counters.values())
                for phase in next(iter(counters.values())).hashed
            },
        )


def _hook_us(before: dict[str, float], after: dict[str, float], steps: int) -> dict[str, float]:
    return {hook: round(1e6 * (spent - before.get(hook, 0.0)) / steps, 1) for hook, spent in after.items()}


def _timed(
    vllm: InProcessVllm, plan: VllmGpuPlan, mark: Callable[[], None]
) -> tuple[dict[str, float], list[float]]:
    """Seconds of each part, and of each single prefill; calls `mark` before and after prefill and decode."""
    mark()
    singles = []
    for prompt in vllm.random_prompts(plan.prefills, plan.prefill):
        vllm.add_requests([prompt], 1)
        started = time.perf_counter()
        vllm.run()
        singles.append(time.perf_counter() - started)
    mark()
    vllm.core.reset_prefix_cache()
    fill, decode = _decode_seconds(vllm, plan, mark)
    return {"prefill": sum(singles), "fill": fill, "decode": decode}, singles


def _decode_seconds(vllm: InProcessVllm, plan: VllmGpuPlan, mark: Callable[[], None]) -> tuple[float, float]:
    """Seconds until all requests decode, then of `plan.steps` steps of all; calls `mark` before and after."""
    count, ends = plan.requests, list[float]()

    def timed_enough(outputs: list[Any]) -> bool:
        if len(outputs) == count:
            ends.append(time.perf_counter())
            if len(ends) in (1, plan.steps + 1):
                mark()
        return len(ends) > plan.steps

    # The first request to decode must still run when the last one has decoded all these steps.
    vllm.add_requests(vllm.random_prompts(count, plan.context), plan.steps + 2 * count + 8)
    started = time.perf_counter()
    vllm.run(timed_enough)
    filled, decoded = ends[0] - started, ends[-1] - ends[0]
    vllm.engine.abort_request([f"request-{vllm.latest_request - number}" for number in range(count)])
    vllm.run()
    return filled, decoded


def _ratios(blocks: list[dict[bool, _Block]], plan: VllmGpuPlan) -> dict[str, Any]:
    ratios: dict[str, Any] = {}
    tokens = {
        "prefill": plan.prefill * plan.prefills,
        "fill": plan.requests * plan.context,
        "decode": plan.requests * plan.steps,
    }
    for part, count in tokens.items():
        pairs = [(pair[False].seconds[part], pair[True].seconds[part]) for pair in blocks]
        none, log = (statistics.median(column) for column in zip(*pairs, strict=True))
        ratios[part] = {
            "tokens_per_second_none": round(count / none, 1),
            "tokens_per_second_log": round(count / log, 1),
            "throughput_ratio": round(sum(none for none, _ in pairs) / sum(log for _, log in pairs), 5),
            "throughput_ratio_median_pair": round(statistics.median(none / log for none, log in pairs), 5),
            "seconds": [[round(second, 4) for second in pair] for pair in pairs],
        }
    # By ordinal: the first prefill after an attach may cost more than the others.
    ratios["prefill"]["each_ms"] = {
        name: [
            round(1e3 * statistics.median(ordinal), 2)
            for ordinal in zip(*(pair[protected].prefills for pair in blocks), strict=True)
        ]
        for name, protected in (("none", False), ("log", True))
    }
    protected = [asdict(pair[True]) for pair in blocks]
    for key in ("violations", "faults", "verified"):
        ratios[key] = sum(block[key] for block in protected)
    return ratios | {key: protected[-1][key] for key in _OF_LAST_BLOCK}
