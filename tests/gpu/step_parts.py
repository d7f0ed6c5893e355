"""Where a step's time goes, with a canary and without: `python -m tests.gpu.step_parts --output FILE`.

One vLLM, in this process; its canary is attached and detached block by block, in random order. A block of
`decode` starts its requests, warms up, and times steps by part: of vLLM's own step, and of the canary's
hooks, each without the parts that it calls. A block of `mixed` times all steps of that load of `bench
vllm-load`, in a pool whose blocks were all written before; both blocks of a round serve the same requests.
Hosts change their speed from block to block by more than a canary costs; the hooks' share of the steps of
their own block, `canary_share`, does not change with it. The time that timing a part takes is in the part
around it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any

from canary_obs.bench.vllm_workloads import LoadedVllm, LoadPlan, fill_pool, run_workload
from tests.engines.vllm.real.cost_clock import Clock

Typical = Callable[[Sequence[float]], float]
_Steps = list[tuple[float, dict[str, float]]]  # seconds of each, and of its parts
SEED = 1
WARM_STEPS = 60  # after which what repeats has been captured
CANARY = "canary: "
# By owner: methods and parts. vLLM's runners and the canary's adapters are of the plan's runner.
VLLM = {
    "vllm.v1.core.sched.scheduler.Scheduler": {"schedule": "schedule", "update_from_output": "update"},
    "vllm.v1.executor.uniproc_executor.UniProcExecutor": {
        "execute_model": "execute", "sample_tokens": "sample",
    },
    "vllm.v1.engine.core.EngineCore": {"step_with_batch_queue": "wait and queue", "step": "wait and queue"},
    "vllm.v1.engine.output_processor.OutputProcessor": {"process_outputs": "process outputs"},
    "vllm.v1.engine.llm_engine.LLMEngine": {"step": "engine"},
}  # fmt: skip
HOOKS = {
    "canary_obs.engines.vllm.output_reports": {"attach_reports": "scheduler's reports"},
    "canary_obs.engines.vllm.adapter.VllmAdapter": {
        "follow_output": "output followed", "end_step": "followed after the launch",
    },
    "canary_obs.engines.vllm.step_hooks.StepHooks": {"begin_forward": "view", "end_step": "end of the step"},
    "canary_obs.runtime.canary.CanaryRuntime": {
        "before_write": "before_write", "forward_launched": "forward_launched",
        "after_forward": "after_forward", "after_step": "after_step",
    },
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The engine, its batch, and the blocks."""

    shape: str
    runner: str  # v1, v2
    requests: int
    context: int  # tokens of each
    steps: int  # timed in a block; of `mixed`, the most tokens of an answer
    rounds: int  # of a block with a canary and one without
    load: str = "decode"  # mixed
    memory: float = 0.1  # share of the device's memory that vLLM may use

    @property
    def mixed(self) -> LoadPlan:
        """Twice as many requests as run together."""
        return LoadPlan(
            requests=self.requests, context=self.context, steps=self.steps, prefill=self.context, prefills=1,
            mixed=2 * self.requests, short=1,
        )  # fmt: skip


@dataclass(slots=True)
class Side:
    """The blocks with a canary, or those without."""

    step_us: list[float] = field(default_factory=list)  # by block: median, or mean of `mixed`
    parts_us: list[dict[str, float]] = field(default_factory=list)  # by block: of each part
    canary_share: list[float] = field(default_factory=list)  # by block

    def add(self, steps: list[tuple[float, dict[str, float]]], typical: Typical = median) -> None:
        """The steps of a block: seconds of each, and of its parts."""
        whole = typical([seconds for seconds, _ in steps])
        self.step_us.append(round(whole * 1e6, 1))
        found = {
            part: typical([parts.get(part, 0.0) for _, parts in steps])
            for part in sorted({part for _, parts in steps for part in parts})
        }
        self.parts_us.append({part: round(seconds * 1e6, 1) for part, seconds in found.items()})
        hooks = sum(seconds for part, seconds in found.items() if part.startswith(CANARY))
        self.canary_share.append(round(hooks / whole, 4))


def measure(plan: Plan) -> Iterator[dict[str, Any]]:
    """What was found so far, after each round; the first one warms up."""
    import torch

    from canary_obs.bench.environment import environment
    from canary_obs.bench.vllm_canary import attached, detach
    from canary_obs.demo.in_process_vllm import InProcessVllm

    clock, draw = Clock(), random.Random(SEED)
    with _timed(clock), TemporaryDirectory() as folder:
        on_gpu = torch.cuda.is_available()
        room: dict[str, Any] = {} if on_gpu else {"num_gpu_blocks_override": 2000}
        vllm = InProcessVllm(
            Path(folder), plan.shape, SEED, max_num_seqs=plan.requests, enable_prefix_caching=True,
            max_model_len=plan.context + WARM_STEPS + plan.steps + 2 * plan.requests + 32,
            block_size=16 if on_gpu else 32, gpu_memory_utilization=plan.memory, **room,
        )  # fmt: skip
        detach(vllm)
        sides = {"without": Side(), "with": Side()}
        totals = {"violations": 0, "faults": 0, "replayed": 0}
        block, typical = (_decode, median) if plan.load == "decode" else (_mixed, fmean)
        for number in range(plan.rounds + 1):
            for name in draw.sample(sorted(sides), 2):
                if name == "without":
                    steps = block(vllm, plan, clock, number)
                else:
                    with attached(vllm) as (canary, adapter):
                        steps = block(vllm, plan, clock, number)
                        with adapter.paused():
                            canary.check_everything()
                        counters = canary.counter_reader
                        totals["violations"] += counters.violations
                        totals["faults"] += canary.health.faults.total()
                        replays = canary.checks.replays
                        totals["replayed"] += 0 if replays is None else replays.replayed
                if number:
                    sides[name].add(steps, typical)
            if number:
                yield {
                    "bench": "step_parts", "plan": asdict(plan), "environment": environment(),
                    "engine": vllm.description(), **{name: asdict(side) for name, side in sides.items()},
                    **totals,
                }  # fmt: skip
        vllm.shutdown()


@contextmanager
def _timed(clock: Clock) -> Iterator[None]:
    """Wraps classes: what is attached later wraps these wrappers, and restores them."""
    replaced = []
    for names, prefix in ((VLLM, ""), (HOOKS, CANARY)):
        for at, methods in names.items():
            owner = resolve_name(at)
            for name, part in methods.items():
                replaced.append((owner, name, getattr(owner, name)))
                clock.wrap(owner, name, prefix + part)
    try:
        yield
    finally:
        for owner, name, original in replaced:
            setattr(owner, name, original)


@contextmanager
def _steps_timed(vllm: Any, clock: Clock) -> Iterator[_Steps]:
    """Filled with the seconds of each step, and of its parts."""
    found, step = _Steps(), vllm.engine.step

    def timed() -> Any:
        clock.seconds.clear()
        started = time.perf_counter()
        outputs = step()
        parts = {part: each for (_, part), each in clock.seconds.items()}
        found.append((time.perf_counter() - started, parts))
        return outputs

    vllm.engine.step = timed
    try:
        yield found
    finally:
        del vllm.engine.step  # the instance's own


def _mixed(vllm: Any, plan: Plan, clock: Clock, seed: int) -> _Steps:
    engine = LoadedVllm(vllm=vllm, clocks=dict)
    vllm.core.reset_prefix_cache()
    fill_pool(vllm, plan.mixed, 1)
    with _steps_timed(vllm, clock) as steps:
        run_workload("mixed", engine, plan.mixed, seed)
    return steps


def _decode(vllm: Any, plan: Plan, clock: Clock, _seed: int) -> _Steps:
    vllm.core.reset_prefix_cache()
    count = plan.requests
    vllm.add_requests(vllm.random_prompts(count, plan.context), WARM_STEPS + plan.steps + 2 * count)
    vllm.run(lambda outputs: len(outputs) == count)
    vllm.run_steps(WARM_STEPS)
    with _steps_timed(vllm, clock) as steps:
        vllm.run_steps(plan.steps)
    vllm.engine.abort_request([f"request-{vllm.latest_request - number}" for number in range(count)])
    vllm.run()
    return steps


def main() -> int:
    """Measure, and write what was found after each round; 1 = a canary failed, or reported something."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", default="small")
    parser.add_argument("--runner", choices=["v1", "v2"], default="v2")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--load", choices=["decode", "mixed"], default="decode")
    parser.add_argument("--memory", type=float, default=0.1, help="share of the device's memory for vLLM")
    parser.add_argument("--output", type=Path)
    given = vars(parser.parse_args())
    output = given.pop("output")
    os.environ |= {
        "KV_CANARY_MODE": "log", "VLLM_USE_V2_MODEL_RUNNER": "1" if given["runner"] == "v2" else "0",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    result: dict[str, Any] = {}
    for result in measure(Plan(**given)):
        if output:
            output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return int(not result or bool(result["violations"] or result["faults"]))


if __name__ == "__main__":
    sys.exit(main())
