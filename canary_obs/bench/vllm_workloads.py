"""What users run, as loads of an in-process vLLM: each a fixed amount of work."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from canary_obs.demo.in_process_vllm import InProcessVllm


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """Sizes of the loads; lengths are tokens."""

    requests: int  # that run together
    context: int  # of each request of `decode`, and the longest prompt of `mixed`
    steps: int  # of `decode` and `single`
    prefill: int  # tokens of one prefill
    prefills: int
    mixed: int  # requests
    short: int  # requests


def fill_pool(vllm: InProcessVllm, plan: LoadPlan, times: int) -> int:
    """Write every block of the pool `times` times; returns the tokens written."""
    cache = vllm.config.cache_config
    wanted = times * cache.num_gpu_blocks * cache.block_size
    written = 0
    while written < wanted:
        prompts = vllm.random_prompts(plan.requests, plan.context)
        vllm.add_requests(prompts, 1)
        vllm.run()
        written += plan.requests * plan.context
    return written


def run_workload(name: str, vllm: InProcessVllm, plan: LoadPlan, seed: int) -> float:
    """Seconds of a load, which is the same for the same `seed`; raises KeyError for an unknown name."""
    draw = random.Random(seed)
    return WORKLOADS[name](vllm, plan, draw)


def _decode(vllm: InProcessVllm, plan: LoadPlan, draw: random.Random) -> float:
    """Steps in which all requests decode behind long contexts."""
    return _decode_seconds(vllm, _prompts(vllm, draw, [plan.context] * plan.requests), plan.steps)


def _single(vllm: InProcessVllm, plan: LoadPlan, draw: random.Random) -> float:
    """Steps of one request alone: the latency that a chat user sees."""
    return _decode_seconds(vllm, _prompts(vllm, draw, [min(plan.context, 512)]), plan.steps)


def _prefill(vllm: InProcessVllm, plan: LoadPlan, draw: random.Random) -> float:
    """Long prompts, one after the other."""
    seconds = 0.0
    for prompt in _prompts(vllm, draw, [plan.prefill] * plan.prefills):
        seconds += _run_all(vllm, [(prompt, 1)])
    return seconds


def _mixed(vllm: InProcessVllm, plan: LoadPlan, draw: random.Random) -> float:
    """Prompts and answers of all lengths, half of them behind one of eight shared prefixes; always full."""
    shared = _prompts(vllm, draw, [max(plan.context // 4, 16)] * 8)
    longest = plan.context - len(shared[0])
    requests = []
    for _ in range(plan.mixed):
        length = min(max(int(draw.lognormvariate(0.0, 1.0) * longest / 6), 8), longest)
        (prompt,) = _prompts(vllm, draw, [length])
        prefix = draw.choice(shared) if draw.random() < 0.5 else []
        requests.append((prefix + prompt, draw.randint(plan.steps // 8 + 1, plan.steps)))
    return _run_all(vllm, requests)


def _short(vllm: InProcessVllm, plan: LoadPlan, draw: random.Random) -> float:
    """Many prompts of 16 to 64 tokens, answered in 8: the scheduler and the host have most of the work."""
    lengths = [draw.randint(16, 64) for _ in range(plan.short)]
    return _run_all(vllm, [(prompt, 8) for prompt in _prompts(vllm, draw, lengths)])


Workload = Callable[[InProcessVllm, LoadPlan, random.Random], float]
WORKLOADS: dict[str, Workload] = {
    "decode": _decode,
    "single": _single,
    "prefill": _prefill,
    "mixed": _mixed,
    "short": _short,
}


def _prompts(vllm: InProcessVllm, draw: random.Random, lengths: list[int]) -> list[list[int]]:
    low, high = vllm.token_ids
    return [[draw.randrange(low, high) for _ in range(length)] for length in lengths]


def _run_all(vllm: InProcessVllm, requests: list[tuple[list[int], int]]) -> float:
    """Seconds until all requests, queued before as (prompt, tokens of the answer), are answered."""
    # vLLM's server queues them in another process: here that would compete with the canary's idle thread.
    for prompt, tokens in requests:
        vllm.add_requests([prompt], tokens)
    vllm.synchronize()
    started = time.perf_counter()
    vllm.run()
    return time.perf_counter() - started


def _decode_seconds(vllm: InProcessVllm, prompts: list[list[int]], steps: int) -> float:
    """Seconds of `steps` steps in which all requests decode; they are aborted then."""
    count, ends = len(prompts), list[float]()

    def timed_enough(outputs: list[Any]) -> bool:
        if len(outputs) == count:
            ends.append(time.perf_counter())
        return len(ends) > steps

    # The first request to decode must still run when the last one has decoded all these steps.
    vllm.add_requests(prompts, steps + 2 * count + 8)
    vllm.run(timed_enough)
    vllm.engine.abort_request([f"request-{vllm.latest_request - number}" for number in range(count)])
    vllm.run()
    return ends[steps] - ends[0]
