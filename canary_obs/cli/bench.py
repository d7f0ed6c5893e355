"""`canary-obs bench`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from canary_obs.cli.bench_report import (
    exit_with,
    print_json_and_table,
    print_kernels,
    print_result,
    write_json,
)
from canary_obs.cli.options import (
    Baseline,
    Device,
    Json,
    Memory,
    Output,
    Runner,
    Seed,
    Shape,
    StepShape,
    Threads,
    require_vllm,
)
from canary_obs.errors import ConfigurationError

if TYPE_CHECKING:
    from canary_obs.bench.repeated_step import StepPlan

bench = typer.Typer(no_args_is_help=True, help="Measure what the canary costs.")

Blocks = Annotated[int, typer.Option(min=2, help="Pairs of blocks.")]
Requests = Annotated[int, typer.Option(min=1, help="Requests of the decode batch.")]
Context = Annotated[int, typer.Option(min=16, help="Tokens of each request.")]
Rounds = Annotated[int, typer.Option(min=2, help="Interleaved rounds.")]
BlockSteps = Annotated[int, typer.Option(min=1, help="Decode steps per block.")]


@bench.command("demo")
def demo(
    blocks: Blocks = 20,
    block_steps: Annotated[int, typer.Option(min=5, help="Engine steps per block.")] = 50,
    seed: Seed = 1,
    json: Json = False,
    shape: Shape = "demo",
    device: Device = "auto",
    threads: Threads = 1,
    baseline: Baseline = None,
) -> None:
    """Overhead of mode log at default settings against mode none: the same load, interleaved in pairs."""
    from canary_obs.bench.demo import PairedPlan, run_paired

    plan = PairedPlan(
        blocks=blocks, block_steps=block_steps, seed=seed, shape=shape, device=device, threads=threads
    )
    result = run_paired(plan)
    print_result(result, as_json=json)
    exit_with(result, baseline)


@bench.command("vllm")
def vllm(
    blocks: Blocks = 10,
    block_steps: Annotated[int, typer.Option(min=5, help="Decode steps per block.")] = 100,
    requests: Requests = 8,
    prompt: Annotated[int, typer.Option(min=16, help="Tokens of each prompt.")] = 128,
    seed: Seed = 1,
    json: Json = False,
    baseline: Baseline = None,
) -> None:
    """Overhead of mode log at default settings on a tiny vLLM, against the same engine without."""
    require_vllm()
    from canary_obs.bench.vllm import VllmPlan, run_vllm

    plan = VllmPlan(blocks=blocks, block_steps=block_steps, requests=requests, prompt=prompt, seed=seed)
    result = run_vllm(plan)
    print_result(result, as_json=json)
    exit_with(result, baseline)


@bench.command("vllm-gpu")
def vllm_gpu(
    shape: StepShape = "8b",
    runner: Runner = "v2",
    requests: Requests = 64,
    context: Context = 4096,
    steps: Annotated[int, typer.Option(min=4, help="Decode steps per block.")] = 128,
    prefill: Annotated[int, typer.Option(min=64, help="Tokens of one prefill step.")] = 8192,
    prefills: Annotated[int, typer.Option(min=1, help="Prefills per block.")] = 6,
    pairs: Blocks = 8,
    memory: Memory = 0.5,
    seed: Seed = 1,
    output: Output = None,
    baseline: Baseline = None,
) -> None:
    """Throughput of a real vLLM on a GPU with the canary at its defaults against none; then flips, syncs."""
    require_vllm()
    from canary_obs.bench.vllm_gpu import VllmGpuPlan, run_vllm_gpu

    plan = VllmGpuPlan(
        shape=shape, runner=runner, requests=requests, context=context, steps=steps, prefill=prefill,
        prefills=prefills, pairs=pairs, memory=memory, seed=seed,
    )  # fmt: skip
    # Written after each pair: a borrowed machine may be reclaimed before the end.
    result = run_vllm_gpu(plan, on_progress=lambda figures: write_json(output, figures))
    write_json(output, result.to_json())
    print_result(result, as_json=False)
    exit_with(result, baseline)


@bench.command("hit")
def hit(
    shape: StepShape = "8b",
    runner: Runner = "v2",
    hits: Annotated[list[int] | None, typer.Option(help="Tokens found in the prefix cache.")] = None,
    rests: Annotated[list[int] | None, typer.Option(help="Tokens of the prompt after them.")] = None,
    load: Annotated[int, typer.Option(min=0, help="Requests that decode in the busy engine.")] = 32,
    pairs: Blocks = 40,
    memory: Memory = 0.5,
    seed: Seed = 1,
    output: Output = None,
    baseline: Baseline = None,
) -> None:
    """Time to first token of prefix hits on a real vLLM, with their bytes compared and not; flips first."""
    require_vllm()
    from canary_obs.bench.hit import HitPlan, run_hit

    plan = HitPlan(
        shape=shape, runner=runner, hits=tuple(hits or (4096, 32768)), rests=tuple(rests or (16, 128, 512)),
        load=load, pairs=pairs, memory=memory, seed=seed,
    )  # fmt: skip
    # Written after each row: a borrowed machine may be reclaimed before the end.
    result = run_hit(plan, on_progress=lambda figures: write_json(output, figures))
    write_json(output, result.to_json())
    print_result(result, as_json=False)
    exit_with(result, baseline)


@bench.command("cpu")
def cpu(
    requests: Annotated[int, typer.Option(min=1, help="Requests in the batch, one new token each.")] = 8,
    prefix: Annotated[int, typer.Option(min=1, help="Tokens each has in the cache.")] = 100,
    layers: Annotated[int, typer.Option(min=1, help="Layers, each with K and V of 128 bytes per slot.")] = 3,
    rounds: Annotated[int, typer.Option(min=1, help="Steps of each backend.")] = 2000,
    seed: Seed = 1,
    json: Json = False,
    baseline: Baseline = None,
) -> None:
    """Time of each operation of a decode step on the CPU, compiled and by reference."""
    from canary_obs.bench.cpu import CpuPlan, run_cpu

    result = run_cpu(CpuPlan(requests=requests, prefix=prefix, layers=layers, rounds=rounds, seed=seed))
    print_result(result, as_json=json)
    exit_with(result, baseline)


@bench.command("sweep-start")
def sweep_start(
    slots: Annotated[int, typer.Option(min=1024, help="Slots of the prefix cache.")] = 10_000_000,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens of a block.")] = 16,
    rounds: Rounds = 5,
    seed: Seed = 1,
    output: Output = None,
    baseline: Baseline = None,
) -> None:
    """Host time that the walk over vLLM's prefix cache takes from the steps of a sweep."""
    from canary_obs.bench.sweep_start import SweepStartPlan, run_sweep_start

    if block_size > slots:
        rule = f"a block has at most the {slots} slots of the cache"
        raise ConfigurationError("--block-size", block_size, rule, "Give a smaller one, or more --slots.")
    plan = SweepStartPlan(
        slots=slots // block_size * block_size, block_size=block_size, rounds=rounds, seed=seed
    )
    result = run_sweep_start(plan)
    print_json_and_table(result, output)
    exit_with(result, baseline)


@bench.command("step")
def step(
    shape: StepShape = "8b",
    requests: Requests = 64,
    context: Context = 4096,
    rounds: Rounds = 20,
    block_steps: BlockSteps = 10,
    output: Output = None,
    baseline: Baseline = None,
) -> None:
    """GPU: what head, tail and patrol add to a captured decode step, interleaved in one run."""
    from canary_obs.bench.step import run_step

    result = run_step(_step_plan(shape, requests, context, rounds, block_steps))
    print_json_and_table(result, output)
    exit_with(result, baseline)


@bench.command("patrol")
def patrol(
    shape: StepShape = "8b",
    requests: Requests = 64,
    context: Context = 4096,
    rounds: Rounds = 10,
    block_steps: BlockSteps = 20,
    output: Output = None,
    baseline: Baseline = None,
) -> None:
    """GPU: step time against patrol bandwidth, by the patrol's budget."""
    from canary_obs.bench.patrol import run_patrol

    result = run_patrol(_step_plan(shape, requests, context, rounds, block_steps))
    print_json_and_table(result, output)
    exit_with(result, baseline)


@bench.command("pipeline")
def pipeline(
    shape: StepShape = "8b",
    requests: Requests = 64,
    context: Context = 4096,
    rounds: Rounds = 20,
    block_steps: Annotated[int, typer.Option(min=1, help="Steps the engine runs ahead.")] = 50,
    output: Output = None,
    baseline: Baseline = None,
) -> None:
    """GPU: host time of after_step while the GPU lags many steps."""
    from canary_obs.bench.pipeline import run_pipeline

    result = run_pipeline(_step_plan(shape, requests, context, rounds, block_steps))
    print_json_and_table(result, output)
    exit_with(result, baseline)


@bench.command("kernels")
def kernels(
    output: Output = None,
    json: Json = False,
    baseline: Baseline = None,
) -> None:
    """Ceilings of the GPU's memory and the kernels against them, in one run."""
    from canary_obs.bench.kernels import WrongResult, run_kernels

    try:
        result = run_kernels()
    except WrongResult as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(1)
    write_json(output, result.to_json())
    print_kernels(result, as_json=json)
    exit_with(result, baseline)


def _step_plan(shape: str, requests: int, context: int, rounds: int, block_steps: int) -> StepPlan:
    from canary_obs.bench.repeated_step import StepPlan

    return StepPlan(shape=shape, requests=requests, context=context, rounds=rounds, block_steps=block_steps)
