"""The command `canary-obs`. Refusals are one line on standard error and exit code 2."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from canary_obs.cli.keys import keys
from canary_obs.config import FILE_VARIABLE, PREFIX, CanaryConfig, ServiceConfig, load, masked
from canary_obs.errors import ConfigurationError, KVCacheViolation, UnsupportedEngine

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__, pretty_exceptions_enable=False)
bench = typer.Typer(no_args_is_help=True, help="Measure what the canary costs.")
app.add_typer(bench, name="bench")
incident = typer.Typer(no_args_is_help=True, help="Read evidence bundles.")
app.add_typer(incident, name="incident")

Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Seed = Annotated[int, typer.Option(help="Seed of weights, traffic and perturbation.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")]
Shape = Annotated[str, typer.Option(help="Engine preset: demo or tiny.")]
Model = Annotated[str, typer.Option(help="Kind of model and KV cache; an unknown name lists them.")]
Threads = Annotated[int, typer.Option(min=1, help="CPU threads; more pay only on otherwise idle cores.")]
Checkpoint = Annotated[Path | None, typer.Option(help="Directory with config.json and *.safetensors.")]


def main() -> None:
    """Run the command line."""
    try:
        app()
    except KVCacheViolation as violation:
        sys.stderr.write(f"KVCacheViolation: {violation}\n")
        sys.exit(1)
    except (ConfigurationError, UnsupportedEngine) as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)


@app.command()
def demo(
    duration: Annotated[float | None, typer.Option(min=0.1, help="Seconds; default: until Ctrl-C.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Stop after this many engine steps.")] = None,
    seed: Seed = 0,
    json: Json = False,
    mode: Annotated[str | None, typer.Option(help="none, log or raise.")] = None,
    perturb: Annotated[str | None, typer.Option(help="MODE=PROBABILITY[,...]: plant faults.")] = None,
    serve: Annotated[bool, typer.Option("--serve", help="Start the service beside the engine.")] = False,
    port: Annotated[int | None, typer.Option(help="Port of that service.")] = None,
    endpoint: Annotated[str | None, typer.Option(help="A running service: ipc://PATH.")] = None,
    arrivals: Annotated[float | None, typer.Option(min=0, help="Requests per step; 0 = idle engine.")] = None,
    shape: Shape = "demo",
    model: Model = "llama",
    device: Device = "auto",
    threads: Threads = 1,
    checkpoint: Checkpoint = None,
    engine: Annotated[str, typer.Option(help="reference, or vllm where it is installed.")] = "reference",
    disaggregated: Annotated[
        bool, typer.Option("--disaggregated", help="Prefill in one process, decode in another.")
    ] = False,
) -> None:
    """Run a small real LLM engine under traffic with the canary inside it."""
    from canary_obs.demo.reference import DemoPlan, run_demo

    if engine not in ("reference", "vllm"):
        raise ConfigurationError("--engine", engine, "no such engine", "Use reference or vllm.")

    overrides: dict[str, Any] = {"perturb_seed": seed}
    if not {f"{PREFIX}SWEEP_INTERVAL", FILE_VARIABLE} & os.environ.keys():
        overrides["sweep_interval"] = 200  # the demo's own default: sweeps to look at
    if mode is not None:
        overrides["mode"] = mode
    if perturb is not None:
        overrides |= {"perturb": perturb, "perturb_enabled": True}
    if endpoint is not None:
        overrides["endpoint"] = endpoint
    plan = DemoPlan(
        duration=duration, steps=steps, seed=seed, json=json, serve=serve, port=port, arrivals=arrivals,
        shape=shape, model=model, device=device, threads=threads, checkpoint=checkpoint, overrides=overrides,
        disaggregated=disaggregated,
    )  # fmt: skip
    if engine == "vllm":
        from canary_obs.demo.vllm import run_vllm_demo

        sys.exit(run_vllm_demo(plan))
    if disaggregated:
        from canary_obs.demo.disaggregated import run_disaggregated

        sys.exit(run_disaggregated(plan))
    sys.exit(run_demo(plan))


@app.command()
def serve(
    host: Annotated[
        str | None, typer.Option(help="Address to bind; wider than loopback needs a token.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="Port to bind; 0 = any.")] = None,
    endpoint: Annotated[
        str | None, typer.Option(help="Where engines report: ipc://PATH or tcp://HOST:PORT.")
    ] = None,
) -> None:
    """Run the service: /metrics, status page, sweeps on demand."""
    from canary_obs.serve import serve as run

    given = {"host": host, "port": port, "endpoint": endpoint}
    run(load(ServiceConfig, overrides={name: value for name, value in given.items() if value is not None}))


@app.command()
def settings() -> None:
    """Print every setting as it stands (secrets masked)."""
    from rich.console import Console
    from rich.table import Table

    for loaded in (load(CanaryConfig), load(ServiceConfig)):
        table = Table("variable", "value", title=type(loaded).__name__)
        for name, value in masked(loaded).items():
            table.add_row(f"KV_CANARY_{name.upper()}", value)
        Console().print(table)


@app.command()
def metrics(
    form: Annotated[str, typer.Option("--format", help="md or json.")] = "md",
) -> None:
    """Print every metric: name, kind, unit, labels, meaning."""
    from canary_obs.telemetry.metric_docs import Format, render

    if form not in list(Format):
        raise ConfigurationError("--format", form, "no such format", "Use md or json.")
    sys.stdout.write(render(Format(form)) + "\n")


app.command()(keys)


@bench.command("demo")
def bench_demo(
    blocks: Annotated[int, typer.Option(min=2, help="Pairs of blocks.")] = 20,
    block_steps: Annotated[int, typer.Option(min=5, help="Engine steps per block.")] = 50,
    seed: Seed = 1,
    json: Json = False,
    shape: Shape = "demo",
    device: Device = "auto",
    threads: Threads = 1,
) -> None:
    """Overhead of mode log at default settings against mode none: the same load, interleaved in pairs."""
    from canary_obs.bench.demo import PairedPlan, run_paired

    plan = PairedPlan(
        blocks=blocks, block_steps=block_steps, seed=seed, json=json, shape=shape, device=device,
        threads=threads,
    )  # fmt: skip
    sys.exit(run_paired(plan))


Requests = Annotated[int, typer.Option(min=1, help="Requests of the decode batch.")]
Context = Annotated[int, typer.Option(min=16, help="Tokens of each request.")]
Rounds = Annotated[int, typer.Option(min=2, help="Interleaved rounds.")]
StepShape = Annotated[str, typer.Option(help="8b or small.")]
Output = Annotated[Path | None, typer.Option(help="Write the JSON here too.")]


@bench.command("vllm")
def bench_vllm(
    blocks: Annotated[int, typer.Option(min=2, help="Pairs of blocks.")] = 10,
    block_steps: Annotated[int, typer.Option(min=5, help="Decode steps per block.")] = 100,
    requests: Annotated[int, typer.Option(min=1, help="Requests of the decode batch.")] = 8,
    prompt: Annotated[int, typer.Option(min=16, help="Tokens of each prompt.")] = 128,
    seed: Seed = 1,
    json: Json = False,
) -> None:
    """Overhead of mode log at default settings on a tiny vLLM, against the same engine without."""
    from canary_obs.bench.vllm import VllmPlan, run_vllm

    plan = VllmPlan(
        blocks=blocks, block_steps=block_steps, requests=requests, prompt=prompt, seed=seed, json=json
    )
    sys.exit(run_vllm(plan))


@bench.command("vllm-gpu")
def bench_vllm_gpu(
    shape: Annotated[str, typer.Option(help="8b or small.")] = "8b",
    runner: Annotated[str, typer.Option(help="vLLM's model runner: v1 or v2.")] = "v2",
    requests: Requests = 64,
    context: Context = 4096,
    steps: Annotated[int, typer.Option(min=4, help="Decode steps per block.")] = 128,
    prefill: Annotated[int, typer.Option(min=64, help="Tokens of one prefill step.")] = 8192,
    prefills: Annotated[int, typer.Option(min=1, help="Prefills per block.")] = 6,
    pairs: Annotated[int, typer.Option(min=2, help="Pairs of blocks.")] = 8,
    memory: Annotated[float, typer.Option(help="Share of the GPU's memory for vLLM.")] = 0.5,
    seed: Seed = 1,
    output: Output = None,
) -> None:
    """Throughput of a real vLLM on a GPU with the canary at its defaults against none; then flips, syncs."""
    from canary_obs.bench.vllm_gpu import VllmGpuPlan, run_vllm_gpu

    plan = VllmGpuPlan(
        shape=shape, runner=runner, requests=requests, context=context, steps=steps, prefill=prefill,
        prefills=prefills, pairs=pairs, memory=memory, seed=seed, output=output,
    )  # fmt: skip
    sys.exit(run_vllm_gpu(plan))


@bench.command("cpu")
def bench_cpu(
    requests: Annotated[int, typer.Option(min=1, help="Requests in the batch, one new token each.")] = 8,
    prefix: Annotated[int, typer.Option(min=1, help="Tokens each has in the cache.")] = 100,
    layers: Annotated[int, typer.Option(min=1, help="Layers, each with K and V of 128 bytes per slot.")] = 3,
    rounds: Annotated[int, typer.Option(min=1, help="Steps of each backend.")] = 2000,
    seed: Seed = 1,
    json: Json = False,
) -> None:
    """What each operation of a decode step takes on the CPU, compiled and by reference."""
    from canary_obs.bench.cpu import CpuPlan, run_cpu

    plan = CpuPlan(requests=requests, prefix=prefix, layers=layers, rounds=rounds, seed=seed, json=json)
    sys.exit(run_cpu(plan))


@bench.command("step")
def bench_step(
    shape: StepShape = "8b",
    requests: Requests = 64,
    context: Context = 4096,
    rounds: Rounds = 20,
    block_steps: Annotated[int, typer.Option(min=1, help="Decode steps per block.")] = 10,
    output: Output = None,
) -> None:
    """GPU: what head, tail and patrol add to a captured decode step, interleaved in one run."""
    from canary_obs.bench.step import StepPlan, run_step

    plan = StepPlan(
        shape=shape, requests=requests, context=context, rounds=rounds, block_steps=block_steps, output=output
    )
    sys.exit(run_step(plan))


@bench.command("patrol")
def bench_patrol(
    shape: StepShape = "8b",
    requests: Requests = 64,
    context: Context = 4096,
    rounds: Rounds = 10,
    block_steps: Annotated[int, typer.Option(min=1, help="Decode steps per block.")] = 20,
    output: Output = None,
) -> None:
    """GPU: step time against patrol bandwidth, by the number of programs the patrol may occupy."""
    from canary_obs.bench.step import StepPlan, run_patrol

    plan = StepPlan(
        shape=shape, requests=requests, context=context, rounds=rounds, block_steps=block_steps, output=output
    )
    sys.exit(run_patrol(plan))


@incident.command("show")
def incident_show(
    file: Annotated[Path, typer.Argument(help="The saved answer of GET /canary/incidents/{id}.")],
) -> None:
    """Print an evidence bundle: what happened, where, what changed, who was there. Needs no service."""
    from canary_obs.cli.incident_text import show
    from canary_obs.telemetry.incident_bundle import read_bundle

    show(read_bundle(file))


@bench.command("kernels")
def bench_kernels(
    output: Annotated[Path | None, typer.Option(help="Write the figures to this JSON file.")] = None,
    json: Json = False,
) -> None:
    """Ceilings of the GPU's memory and the kernels against them, in one run."""
    from canary_obs.bench.kernels import run_kernels

    sys.exit(run_kernels(output, json))


@bench.command("pipeline")
def bench_pipeline(
    shape: StepShape = "8b",
    requests: Requests = 64,
    context: Context = 4096,
    rounds: Rounds = 20,
    block_steps: Annotated[int, typer.Option(min=1, help="Steps the engine runs ahead.")] = 50,
    output: Output = None,
) -> None:
    """GPU: host time of after_step while the GPU is many steps behind."""
    from canary_obs.bench.pipeline import run_pipeline
    from canary_obs.bench.step import StepPlan

    plan = StepPlan(
        shape=shape, requests=requests, context=context, rounds=rounds, block_steps=block_steps, output=output
    )
    sys.exit(run_pipeline(plan))
