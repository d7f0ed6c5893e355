"""`canary-obs bench vllm-gpu`: throughput of a real vLLM with the canary at its defaults against none."""

from __future__ import annotations

import json
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch

from canary_obs.bench.machine import machine
from canary_obs.bench.statistics import exit_code, show
from canary_obs.bench.vllm_flips import flip_everywhere, not_found
from canary_obs.bench.vllm_host import VllmHost
from canary_obs.runtime.canary import CanaryRuntime
from canary_obs.runtime.report.snapshot import counters_of

if TYPE_CHECKING:
    from canary_obs.engines.vllm.adapter import VllmAdapter

_OF_THE_LAST = "attach", "decode_host_us", "prefill_host_us", "hashed"  # protected block
_BLOCK_SIZE = {"cuda": 16, "cpu": 32}


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmGpuPlan:
    """What the command line asked for."""

    shape: str
    runner: str  # v1, v2
    requests: int
    context: int
    steps: int
    prefill: int
    prefills: int
    pairs: int
    memory: float  # share of the GPU's that vLLM may take
    seed: int
    output: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """One block's seconds, and what the canary said of it."""

    seconds: dict[str, float]  # prefill: one after another; fill: all requests' contexts; decode
    prefills: list[float]  # seconds of each of the former
    attach: float = 0.0
    violations: int = 0
    faults: int = 0
    decode_host_us: dict[str, float] | None = None  # per decode step, by hook
    prefill_host_us: dict[str, float] | None = None  # per prefill, by hook
    hashed: dict[str, int] | None = None
    verified: int = 0


def run_vllm_gpu(plan: VllmGpuPlan) -> int:
    """Interleaved pairs on one engine, each block from an empty prefix cache; then flips and syncs."""
    os.environ |= {
        "KV_CANARY_MODE": "log",
        "VLLM_USE_V2_MODEL_RUNNER": "1" if plan.runner == "v2" else "0",
    }
    result: dict[str, Any] = {"plan": {key: value for key, value in asdict(plan).items() if key != "output"}}
    with TemporaryDirectory() as folder:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        host = VllmHost(
            Path(folder), plan.shape, plan.seed, enable_prefix_caching=True, max_num_seqs=plan.requests,
            max_model_len=max(plan.context + plan.steps + 2 * plan.requests + 16, plan.prefill + 16),
            max_num_batched_tokens=plan.prefill, gpu_memory_utilization=plan.memory,
            block_size=_BLOCK_SIZE[device],
        )  # fmt: skip
        result |= machine() | host.facts()
        for blocks in _pairs(host, plan):
            result |= _ratios(blocks, plan)
            # A lent machine may go before the end: what was measured so far is not lost with it.
            _write(plan, result | {"unfinished": f"{len(blocks)} of {plan.pairs} pairs, no flips"})
        with _protected(host) as (canary, adapter):
            result["flips"] = flip_everywhere(host, canary, adapter, plan.context, plan.seed)
            result["syncs"] = _syncs(host, canary, adapter)
            result["faults"] += canary.health.faults.total()
            result["state"] = [canary.verdict()[0].value, *canary.verdict()[1]]
        host.core.shutdown()
    _write(plan, result)
    show("vLLM with the canary at its defaults against none", result, as_json=False)
    return exit_code(
        violations=result["violations"],
        observer_faults=result["faults"],
        waits_for_the_device=result["syncs"].get("waits"),
        flips=not_found(result["flips"]),
    )


def _write(plan: VllmGpuPlan, result: dict[str, Any]) -> None:
    if plan.output is not None:
        plan.output.write_text(json.dumps(result, indent=1) + "\n")


def _pairs(host: VllmHost, plan: VllmGpuPlan) -> Iterator[list[dict[bool, _Block]]]:
    """The pairs so far, after each. The first one warms up and is left out."""
    draw = random.Random(plan.seed)
    found: list[dict[bool, _Block]] = []
    for number in range(plan.pairs + 1):
        order = (False, True) if draw.random() < 0.5 else (True, False)
        pair = {protected: _block(host, plan, protected=protected) for protected in order}
        if number:
            found.append(pair)
            yield found


def _block(host: VllmHost, plan: VllmGpuPlan, *, protected: bool) -> _Block:
    host.core.reset_prefix_cache()
    if not protected:
        seconds, prefills = _timed(host, plan, lambda: None)
        return _Block(seconds=seconds, prefills=prefills)
    started = time.perf_counter()
    with _protected(host) as (canary, adapter):
        attach = time.perf_counter() - started
        marks: list[dict[str, float]] = []
        seconds, prefills = _timed(host, plan, lambda: marks.append(dict(canary.overhead)))
        host.rest()
        with adapter.at_rest():
            canary.check_everything()
        counters = counters_of(canary)
        return _Block(
            seconds=seconds,
            prefills=prefills,
            attach=attach,
            violations=canary.counter_reader.violations,
            faults=sum(canary.health.faults.values()),
            decode_host_us=_spent(marks[2], marks[3], plan.steps),
            prefill_host_us=_spent(marks[0], marks[1], plan.prefills),
            verified=sum(sum(group.verified.values()) for group in counters.values()),
            hashed={
                phase.value: sum(group.hashed[phase] for group in counters.values())
                for phase in next(iter(counters.values())).hashed
            },
        )


def _spent(before: dict[str, float], after: dict[str, float], steps: int) -> dict[str, float]:
    return {hook: round(1e6 * (spent - before[hook]) / steps, 1) for hook, spent in after.items()}


def _timed(
    host: VllmHost, plan: VllmGpuPlan, mark: Callable[[], None]
) -> tuple[dict[str, float], list[float]]:
    mark()
    singles = [host.seconds([prompt], 1) for prompt in host.prompts(plan.prefills, plan.prefill)]
    mark()
    host.core.reset_prefix_cache()
    fill, decode = host.decode_seconds(host.prompts(plan.requests, plan.context), plan.steps, mark)
    return {"prefill": sum(singles), "fill": fill, "decode": decode}, singles


@contextmanager
def _protected(host: VllmHost) -> Iterator[tuple[CanaryRuntime, VllmAdapter]]:
    from canary_obs.engines.vllm import plugin
    from canary_obs.engines.vllm.worker import (
        attach_to_worker,
        attached_adapter,
        detach_from_worker,
        runtime_of,
    )

    plugin.register()
    host.core.reset_prefix_cache()
    attach_to_worker(host.worker)
    try:
        adapter, canary = attached_adapter(host.worker), runtime_of(host.worker)
        assert canary is not None, "an attached adapter has a canary"
        yield canary, adapter
    finally:
        detach_from_worker(host.worker)
        plugin.unregister()


def _ratios(blocks: list[dict[bool, _Block]], plan: VllmGpuPlan) -> dict[str, Any]:
    found: dict[str, Any] = {}
    tokens = {
        "prefill": plan.prefill * plan.prefills,
        "fill": plan.requests * plan.context,
        "decode": plan.requests * plan.steps,
    }
    for part, count in tokens.items():
        pairs = [(pair[False].seconds[part], pair[True].seconds[part]) for pair in blocks]
        none, log = (statistics.median(column) for column in zip(*pairs, strict=True))
        found[part] = {
            "tokens_per_second_none": round(count / none, 1),
            "tokens_per_second_log": round(count / log, 1),
            "throughput_ratio": round(sum(none for none, _ in pairs) / sum(log for _, log in pairs), 5),
            "throughput_ratio_median_pair": round(statistics.median(none / log for none, log in pairs), 5),
            "seconds": [[round(second, 4) for second in pair] for pair in pairs],
        }
    # Whether each costs the same, or the first after an attach more.
    found["prefill"]["each_ms"] = {
        name: [
            round(1e3 * statistics.median(ordinal), 2)
            for ordinal in zip(*(pair[protected].prefills for pair in blocks), strict=True)
        ]
        for name, protected in (("none", False), ("log", True))
    }
    protected = [asdict(pair[True]) for pair in blocks]
    for key in ("violations", "faults", "verified"):
        found[key] = sum(block[key] for block in protected)
    return found | {key: protected[-1][key] for key in _OF_THE_LAST}


def _syncs(host: VllmHost, canary: CanaryRuntime, adapter: VllmAdapter) -> dict[str, Any]:
    """Requests come, prefill, decode and end while every wait for the device within our hooks is an error."""
    if not torch.cuda.is_available():
        return {"checked": False}
    hooks: tuple[tuple[Any, tuple[str, ...]], ...] = (
        (canary, ("before_write", "forward_launched", "after_forward", "after_step")),
        (adapter, ("_view", "complete", "_announce")),
    )
    for owner, names in hooks:
        for name in names:
            setattr(owner, name, _strict(getattr(owner, name)))
    before = dict(canary.health.faults)
    host.ask(host.prompts(8, 300), 20)
    host.run()
    for owner, names in hooks:
        for name in names:
            delattr(owner, name)
    caught = {part: count - before.get(part, 0) for part, count in canary.health.faults.items()}
    return {"checked": True, "waits": {part: count for part, count in caught.items() if count}}


def _strict(method: Any) -> Any:
    def strict(*given: Any, **named: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return method(*given, **named)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return strict
