"""`canary-obs bench vllm-load` and `bench vllm-host`."""

from __future__ import annotations

from typing import Annotated

import typer

from canary_obs.cli.bench import Context, Requests
from canary_obs.cli.bench_report import exit_with, print_result, write_json
from canary_obs.cli.options import (
    Baseline,
    EngineShape,
    Memory,
    Output,
    Runner,
    Seed,
    StepShape,
    require_vllm,
)

Batches = Annotated[
    list[int] | None, typer.Option(min=1, help="Sizes of the steady batches; 1, 8, 64, 256 by default.")
]
_BATCHES = (1, 8, 64, 256)


def vllm_load(
    shape: EngineShape = "8b",
    runner: Runner = "v2",
    loads: Annotated[list[str] | None, typer.Option(help="Loads to run; all by default.")] = None,
    batches: Batches = None,
    requests: Requests = 64,
    context: Context = 2048,
    steps: Annotated[int, typer.Option(min=8, help="Steps of the loads that decode.")] = 128,
    prefill: Annotated[int, typer.Option(min=64, help="Tokens of one prefill.")] = 8192,
    prefills: Annotated[int, typer.Option(min=1, help="Prefills per round.")] = 6,
    mixed: Annotated[int, typer.Option(min=1, help="Requests of the mixed load.")] = 128,
    short: Annotated[int, typer.Option(min=1, help="Requests of the load of short ones.")] = 1024,
    rounds: Annotated[int, typer.Option(min=2, help="Rounds in which every engine runs every load.")] = 8,
    seconds: Annotated[
        float | None, typer.Option(min=1.0, help="End in about so many seconds, with fewer rounds.")
    ] = None,
    memory: Memory = 0.3,
    control: Annotated[bool, typer.Option(help="Run a second engine without a canary, too.")] = True,
    seed: Seed = 1,
    output: Output = None,
    baseline: Baseline = None,
) -> None:
    """What users run, on pools long in use: throughput, latencies, host time, with and without the canary."""
    require_vllm()
    from canary_obs.bench.vllm_load import LOADS, VllmLoadPlan, run_vllm_load
    from canary_obs.bench.vllm_workloads import LoadPlan

    load = LoadPlan(
        requests=requests, context=context, steps=steps, prefill=prefill, prefills=prefills,
        mixed=mixed, short=short,
    )  # fmt: skip
    plan = VllmLoadPlan(
        shape=shape, runner=runner, load=load, names=tuple(loads or LOADS),
        batches=tuple(batches or _BATCHES), rounds=rounds, seconds=seconds, memory=memory,
        control=control, seed=seed,
    )  # fmt: skip
    # Written after each round: a borrowed machine may be reclaimed before the end.
    result = run_vllm_load(plan, on_progress=lambda figures: write_json(output, figures))
    write_json(output, result.to_json())
    print_result(result, as_json=False)
    exit_with(result, baseline)


def vllm_host(
    shape: StepShape = "tiny",
    runner: Runner = "v1",
    batches: Batches = None,
    steps: Annotated[int, typer.Option(min=8, help="Decode steps of each batch and round.")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds in which every batch runs.")] = 4,
    memory: Memory = 0.1,
    seed: Seed = 1,
    output: Output = None,
    baseline: Baseline = None,
) -> None:
    """Host time of the hooks per steady decode step; on a CPU without that of the kernels."""
    require_vllm()
    from canary_obs.bench.vllm_host import run_vllm_host
    from canary_obs.bench.vllm_load import BATCH, VllmLoadPlan
    from canary_obs.bench.vllm_workloads import BATCH_CONTEXT, LoadPlan

    sizes = tuple(batches or _BATCHES)
    load = LoadPlan(
        requests=max(sizes), context=BATCH_CONTEXT, steps=steps, prefill=max(512, *sizes), prefills=1,
        mixed=1, short=1,
    )  # fmt: skip
    plan = VllmLoadPlan(
        shape=shape, runner=runner, load=load, names=(BATCH,), batches=sizes, rounds=rounds, seconds=None,
        memory=memory, control=False, seed=seed,
    )  # fmt: skip
    result = run_vllm_host(plan, on_progress=lambda figures: write_json(output, figures))
    write_json(output, result.to_json())
    print_result(result, as_json=False)
    exit_with(result, baseline)
