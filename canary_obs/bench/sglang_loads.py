"""What users run, as loads of an SGLang engine: each a fixed amount of work."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from canary_obs.bench.step_log import Answer, spent_us, with_pinned

_FIRST_TOKEN = 3  # smaller ids are special tokens
_SETTLING_STEPS = 3  # of a decode, before they are timed
_HITS, _REST = 8, 16  # of each cached prompt; tokens after it


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangLoads:
    """Sizes of the loads; lengths are tokens."""

    requests: int  # of `decode`, `sweep` and `mixed`, that run together
    context: int  # of each of these
    few: int  # requests of `few`
    few_context: int
    steps: int  # that the loads which decode take
    prefill: int
    prefills: int  # prompts of `prefill`, and cached ones of `hit`
    mixed: int  # requests


class SglangEngine:
    """An engine with the taps of the bench."""

    def __init__(self, engine: Any, ask_scheduler: Callable[..., Any], vocabulary: int) -> None:
        """`ask_scheduler`: a command of the taps, with its seed; returns the answer."""
        self._engine, self.ask_scheduler, self._vocabulary = engine, ask_scheduler, vocabulary

    def shutdown(self) -> None:
        """End the engine's processes."""
        self._engine.shutdown()

    def flush(self) -> None:
        """Empty its prefix cache."""
        self._engine.flush_cache()

    def fill(self, tokens: int, plan: SglangLoads, seed: int) -> None:
        """Write every slot of a pool of so many, as in an engine that has run for a while."""
        length = min(plan.context, plan.prefill)
        self.generate(self.prompts(random.Random(seed), [length] * -(-tokens // length)), 1)

    def prompts(self, draw: random.Random, lengths: list[int]) -> list[list[int]]:
        """Token ids."""
        return [[draw.randrange(_FIRST_TOKEN, self._vocabulary) for _ in range(length)] for length in lengths]

    def generate(self, prompts: list[list[int]], tokens: int | list[int]) -> float:
        """Seconds until all are answered with so many tokens each."""
        counts = [tokens] * len(prompts) if isinstance(tokens, int) else tokens
        sampling = [{"max_new_tokens": count, "temperature": 0, "ignore_eos": True} for count in counts]
        started = time.perf_counter()
        self._engine.generate(input_ids=prompts, sampling_params=sampling)
        return time.perf_counter() - started


def run_load(name: str, engine: SglangEngine, plan: SglangLoads, seed: int) -> Answer:
    """Run a load, which is the same for the same `seed`; raises KeyError for an unknown name."""
    return with_pinned(lambda: LOADS[name](engine, plan, random.Random(seed)))


def _decode(engine: SglangEngine, plan: SglangLoads, draw: random.Random) -> Answer:
    return _steps(engine, engine.prompts(draw, [plan.context] * plan.requests), plan.steps)


def _few(engine: SglangEngine, plan: SglangLoads, draw: random.Random) -> Answer:
    return _steps(engine, engine.prompts(draw, [plan.few_context] * plan.few), plan.steps)


def _single(engine: SglangEngine, plan: SglangLoads, draw: random.Random) -> Answer:
    return _steps(engine, engine.prompts(draw, [min(plan.context, 1024)]), plan.steps)


def _sweep(engine: SglangEngine, plan: SglangLoads, draw: random.Random) -> Answer:
    """`decode`, with a sweep of the whole prefix cache that begins in it."""
    return _steps(engine, engine.prompts(draw, [plan.context] * plan.requests), plan.steps, sweep=True)


def _prefill(engine: SglangEngine, plan: SglangLoads, draw: random.Random) -> Answer:
    """Long prompts, one after the other."""
    prompts = engine.prompts(draw, [plan.prefill] * plan.prefills)
    seconds = sum(engine.generate([prompt], 1) for prompt in prompts)
    return {"seconds": seconds, "tokens": plan.prefill * plan.prefills}


def _hit(engine: SglangEngine, plan: SglangLoads, draw: random.Random) -> Answer:
    """Prompts whose first `context` tokens are cached, one after the other: time to first token."""
    cached = engine.prompts(draw, [plan.context] * plan.prefills)
    engine.generate(cached, 1)
    asked = [prefix + rest for prefix in cached for rest in engine.prompts(draw, [_REST] * _HITS)]
    times = [engine.generate([prompt], 1) for prompt in draw.sample(asked, len(asked))]
    return {
        "seconds": sum(times),
        "tokens": plan.context * len(asked),
        "median_ms": round(1e3 * statistics.median(times), 4),
    }


def _mixed(engine: SglangEngine, plan: SglangLoads, draw: random.Random) -> Answer:
    """Prompts and answers of all lengths, half of them behind one of eight shared prefixes; always full."""
    shared = engine.prompts(draw, [max(plan.context // 4, 16)] * 8)
    longest = plan.context - len(shared[0])
    prompts, tokens = [], []
    for _ in range(plan.mixed):
        length = min(max(int(draw.lognormvariate(0.0, 1.0) * longest / 6), 8), longest)
        (prompt,) = engine.prompts(draw, [length])
        prompts.append((draw.choice(shared) if draw.random() < 0.5 else []) + prompt)
        tokens.append(draw.randint(plan.steps // 8 + 1, plan.steps))
    engine.ask_scheduler("begin")
    seconds = engine.generate(prompts, tokens)
    return {"seconds": seconds, "tokens": sum(tokens)} | _step_values(engine.ask_scheduler("end")["steps"])


LOADS: dict[str, Callable[[SglangEngine, SglangLoads, random.Random], Answer]] = {
    "decode": _decode,
    "few": _few,
    "single": _single,
    "prefill": _prefill,
    "hit": _hit,
    "mixed": _mixed,
    "sweep": _sweep,
}


def _steps(engine: SglangEngine, prompts: list[list[int]], steps: int, *, sweep: bool = False) -> Answer:
    """Seconds of the steps in which all of these requests decode, from prompts that are cached."""
    engine.generate(prompts, 1)
    engine.ask_scheduler("begin", int(sweep))
    engine.generate(prompts, steps)
    found = engine.ask_scheduler("end")
    decoding = [step for step in found["steps"] if step[1] == "DECODE" and step[2] == len(prompts)]
    timed = decoding[_SETTLING_STEPS:]
    if len(timed) < 2:
        most = max((step[2] for step in found["steps"] if step[1] == "DECODE"), default=0)
        raise LookupError(
            f"{len(decoding)} steps decoded all {len(prompts)} requests, and none more than {most}; the rule "
            "is 5 steps: give the engine more room, or ask for fewer requests"
        )
    gaps = [after[0] - before[0] for before, after in pairwise(timed)]
    under_sweep = [gap for gap, step in zip(gaps, timed, strict=False) if step[3]]
    return {
        "seconds": sum(gaps),
        "tokens": len(gaps) * len(prompts),
        "steps": len(gaps),
        "median_ms": round(1e3 * statistics.median(gaps), 4),
        "longest_ms": round(1e3 * max(gaps), 4),
        "swept_steps": len(under_sweep),
        "longest_swept_ms": round(1e3 * max(under_sweep, default=0.0), 4),
        "sweep": found.get("sweep"),
    } | _step_values(timed)


def _step_values(steps: list[list[Any]]) -> Answer:
    """Of the taps' steps: what passes from one to the next, and the canary's host time by hook."""
    return {
        "itl_ms": [round(1e3 * (after[0] - before[0]), 4) for before, after in pairwise(steps)],
        "host_us": spent_us(clocks for *_, clocks in steps),
    }
