"""What users run, as loads of an in-process vLLM: each a fixed amount of work."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from canary_obs.bench.step_log import Answer, Clocks, StepLog, spent_us, with_pinned
from canary_obs.demo.in_process_vllm import InProcessVllm

FIRST_TOKEN_PROMPT = 512  # tokens
_FIRST_TOKENS = 8  # requests whose first token is timed, per round
_DECODING = 32  # requests that decode meanwhile in `ttft-busy`
_STEPS_BETWEEN = 6  # of these, between two timed requests
_IDLE_SECONDS = (
    0.07  # for so long the engine has no request: longer than the canary waits before it uses that
)
BATCH_CONTEXT = 64  # tokens of each request in the steady batches


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """Sizes of the loads; lengths are tokens."""

    requests: int  # that run together
    context: int  # of each request of `decode`, and the longest prompt of `mixed`
    steps: int  # of the loads that decode
    prefill: int  # tokens of one prefill
    prefills: int
    mixed: int  # requests
    short: int  # requests

    def decoding_length(self, count: int, context: int) -> int:
        """Tokens that each of `count` requests may have when all of them have decoded `steps` together."""
        return context + self.steps + count * context // self.prefill + 64

    @property
    def busy(self) -> int:
        """Requests that decode in `ttft-busy`."""
        return min(_DECODING, self.requests)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedVllm:
    """The engine, and the clocks of its canary."""

    vllm: InProcessVllm
    clocks: Clocks

    def limit_running(self, count: int) -> None:
        """Let no more requests run together."""
        scheduler = self.vllm.core.scheduler
        # Since 0.32 the number of the runner's slots is another one.
        name = "max_num_active_reqs" if hasattr(scheduler, "max_num_active_reqs") else "max_num_running_reqs"
        setattr(scheduler, name, count)


def fill_pool(vllm: InProcessVllm, plan: LoadPlan, times: int) -> int:
    """Write every block of the pool `times` times; returns the tokens written."""
    cache, groups = vllm.config.cache_config, vllm.runner.kv_cache_config.kv_cache_groups
    wanted = times * cache.num_gpu_blocks * cache.block_size // len(groups)  # each takes as many blocks
    written = 0
    while written < wanted:
        prompts = vllm.random_prompts(plan.requests, plan.context)
        vllm.add_requests(prompts, 1)
        vllm.run()
        written += plan.requests * plan.context
    return written


def run_workload(name: str, engine: LoadedVllm, plan: LoadPlan, seed: int) -> Answer:
    """Run a load, which is the same for the same `seed`: one of WORKLOADS, or `batch-N`.

    The answer has `seconds` and `tokens`, and of these what the load has: `itl_ms` (gaps between steps
    that gave tokens), `ttft_ms` (of each request), `host_us` by hook, per step or as `host_per` says;
    on a GPU `pinned`, too: `allocations` of pinned memory, which may wait for the device, and their `us`.
    """
    return with_pinned(lambda: _run_workload(name, engine, plan, random.Random(seed)))


def _run_workload(name: str, engine: LoadedVllm, plan: LoadPlan, draw: random.Random) -> Answer:
    if name.startswith("batch-"):
        count = int(name.removeprefix("batch-"))
        engine.limit_running(count)
        return _decode_together(engine, draw, [BATCH_CONTEXT] * count, plan)
    engine.limit_running(plan.requests)
    return WORKLOADS[name](engine, plan, draw)


def _decode(engine: LoadedVllm, plan: LoadPlan, draw: random.Random) -> Answer:
    """Steps in which all requests decode behind long contexts."""
    return _decode_together(engine, draw, [plan.context] * plan.requests, plan)


def _single(engine: LoadedVllm, plan: LoadPlan, draw: random.Random) -> Answer:
    """Steps of one request alone: the latency that a chat user sees."""
    return _decode_together(engine, draw, [min(plan.context, 512)], plan)


def _prefill(engine: LoadedVllm, plan: LoadPlan, draw: random.Random) -> Answer:
    """Long prompts, one after the other."""
    seconds, sums = 0.0, [dict(engine.clocks())]
    for prompt in _prompts(engine, draw, [plan.prefill] * plan.prefills):
        seconds += _run_all(engine, [(prompt, 1)])["seconds"]
        sums.append(dict(engine.clocks()))
    tokens = plan.prefill * plan.prefills
    return {"seconds": seconds, "tokens": tokens, "host_us": spent_us(sums), "host_per": "request"}


def _mixed(engine: LoadedVllm, plan: LoadPlan, draw: random.Random) -> Answer:
    """Prompts and answers of all lengths, half of them behind one of eight shared prefixes; always full."""
    shared = _prompts(engine, draw, [max(plan.context // 4, 16)] * 8)
    longest = plan.context - len(shared[0])
    requests = []
    for _ in range(plan.mixed):
        length = min(max(int(draw.lognormvariate(0.0, 1.0) * longest / 6), 8), longest)
        (prompt,) = _prompts(engine, draw, [length])
        prefix = draw.choice(shared) if draw.random() < 0.5 else []
        requests.append((prefix + prompt, draw.randint(plan.steps // 8 + 1, plan.steps)))
    return _run_all(engine, requests)


def _short(engine: LoadedVllm, plan: LoadPlan, draw: random.Random) -> Answer:
    """Many prompts of 16 to 64 tokens, answered in 8: the scheduler and the host have most of the work."""
    lengths = [draw.randint(16, 64) for _ in range(plan.short)]
    return _run_all(engine, [(prompt, 8) for prompt in _prompts(engine, draw, lengths)])


def _ttft(engine: LoadedVllm, _plan: LoadPlan, draw: random.Random) -> Answer:
    """Requests that come to an idle engine, one after the other."""
    firsts = []
    for prompt in _prompts(engine, draw, [FIRST_TOKEN_PROMPT] * _FIRST_TOKENS):
        time.sleep(_IDLE_SECONDS)
        firsts.append(_first_token(engine, prompt, StepLog(engine.clocks)))
        engine.vllm.run()
    return _first_tokens(firsts)


def _ttft_busy(engine: LoadedVllm, plan: LoadPlan, draw: random.Random) -> Answer:
    """Requests that come while others decode; what these wait for their tokens meanwhile."""
    vllm, count, log = engine.vllm, plan.busy, StepLog(engine.clocks)
    engine.limit_running(count + 1)
    first = vllm.latest_request + 1
    vllm.add_requests(_prompts(engine, draw, [min(plan.context, 512)] * count), _busy_tokens(count))
    vllm.run(lambda outputs: len(outputs) == count)
    firsts = []
    for prompt in _prompts(engine, draw, [FIRST_TOKEN_PROMPT] * _FIRST_TOKENS):
        for _ in range(_STEPS_BETWEEN):
            log.note(vllm.engine.step())
        firsts.append(_first_token(engine, prompt, log))
    _abort(vllm, range(first, first + count))
    return _first_tokens(firsts) | {"itl_ms": log.token_gaps_ms()}


def busy_length(plan: LoadPlan) -> int:
    """Tokens that each request that decodes in `ttft-busy` may have."""
    return min(plan.context, 512) + _busy_tokens(plan.busy)


Workload = Callable[[LoadedVllm, LoadPlan, random.Random], Answer]
WORKLOADS: dict[str, Workload] = {
    "decode": _decode,
    "single": _single,
    "prefill": _prefill,
    "mixed": _mixed,
    "short": _short,
    "ttft": _ttft,
    "ttft-busy": _ttft_busy,
}


def _busy_tokens(count: int) -> int:
    # They start one behind the other; a prompt may take several steps of a small budget.
    return 2 * count + _FIRST_TOKENS * (_STEPS_BETWEEN + 16)


def _prompts(engine: LoadedVllm, draw: random.Random, lengths: list[int]) -> list[list[int]]:
    low, high = engine.vllm.token_ids
    return [[draw.randrange(low, high) for _ in range(length)] for length in lengths]


def _first_token(
    engine: LoadedVllm, prompt: list[int], log: StepLog
) -> tuple[float, Mapping[str, float], Mapping[str, float]]:
    """Seconds from a request to its only token, and the clocks before and after."""
    vllm = engine.vllm

    def answered(outputs: list[Any]) -> bool:
        log.note(outputs)
        return any(output.request_id == f"request-{vllm.latest_request}" for output in outputs)

    vllm.synchronize()
    before, started = dict(engine.clocks()), time.perf_counter()
    vllm.add_requests([prompt], 1)
    vllm.run(answered)
    return log.steps[-1][0] - started, before, log.steps[-1][2]


def _first_tokens(firsts: list[tuple[float, Mapping[str, float], Mapping[str, float]]]) -> Answer:
    spent = [spent_us(clocks) for _, *clocks in firsts]
    hooks = sorted(set().union(*spent))
    seconds = [each for each, *_ in firsts]
    return {
        "seconds": sum(seconds),
        "tokens": FIRST_TOKEN_PROMPT * len(firsts),
        "ttft_ms": [round(1e3 * each, 4) for each in seconds],
        "host_us": {hook: [value for each in spent for value in each.get(hook, [0.0])] for hook in hooks},
        "host_per": "request",
    }


def _run_all(engine: LoadedVllm, requests: list[tuple[list[int], int]]) -> Answer:
    """Until all requests, queued before as (prompt, tokens of the answer), are answered."""
    vllm, log = engine.vllm, StepLog(engine.clocks)

    def noted(outputs: list[Any]) -> bool:
        log.note(outputs)
        return False

    # vLLM's server queues them in another process: here that would compete with the canary's idle thread.
    for prompt, tokens in requests:
        vllm.add_requests([prompt], tokens)
    vllm.synchronize()
    started = time.perf_counter()
    vllm.run(noted)
    return {
        "seconds": time.perf_counter() - started,
        "tokens": sum(tokens for _, tokens in requests),
        "itl_ms": log.token_gaps_ms(),
        "host_us": log.host_us(),
    }


def _decode_together(engine: LoadedVllm, draw: random.Random, contexts: list[int], plan: LoadPlan) -> Answer:
    """`plan.steps` steps in which all requests decode; they are aborted then."""
    vllm, count, steps, log = engine.vllm, len(contexts), plan.steps, StepLog(engine.clocks)

    def timed_enough(outputs: list[Any]) -> bool:
        if len(outputs) == count:
            log.note(outputs)
        return len(log.steps) > steps

    # The first request to decode must still run when the last one has decoded all these steps.
    vllm.add_requests(_prompts(engine, draw, contexts), steps + 2 * count + 8)
    vllm.run(timed_enough)
    _abort(vllm, range(vllm.latest_request - count + 1, vllm.latest_request + 1))
    return {
        "seconds": log.seconds(), "tokens": count * steps, "itl_ms": log.token_gaps_ms(),
        "host_us": log.host_us(),
    }  # fmt: skip


def _abort(vllm: InProcessVllm, requests: range) -> None:
    vllm.engine.abort_request([f"request-{number}" for number in requests])
    vllm.run()
