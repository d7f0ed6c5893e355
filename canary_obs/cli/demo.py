"""`canary-obs demo`."""

from __future__ import annotations

import json as jsonlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from canary_obs.cli.options import Device, Json, Seed, Shape, Threads
from canary_obs.cli.output import write_out
from canary_obs.config import masked
from canary_obs.errors import ConfigurationError

if TYPE_CHECKING:
    from canary_obs.demo.plan import DemoPlan

Model = Annotated[str, typer.Option(help="Kind of model and KV cache; an unknown name lists them.")]
Checkpoint = Annotated[Path | None, typer.Option(help="Directory with config.json and *.safetensors.")]


def demo(
    duration: Annotated[float | None, typer.Option(min=0.1, help="Seconds; default: until Ctrl-C.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Stop after this many engine steps.")] = None,
    seed: Seed = 0,
    json: Json = False,
    mode: Annotated[str | None, typer.Option(help="none, log or raise.")] = None,
    perturb: Annotated[str | None, typer.Option(help="MODE=PROBABILITY[,...]: inject faults.")] = None,
    perturb_group: Annotated[str | None, typer.Option(help="KV group that faults are injected into.")] = None,
    serve: Annotated[bool, typer.Option("--serve", help="Start the service as a child process.")] = False,
    port: Annotated[int | None, typer.Option(help="Port of that service.")] = None,
    endpoint: Annotated[str | None, typer.Option(help="A running service: ipc://PATH.")] = None,
    arrivals: Annotated[float | None, typer.Option(min=0, help="Requests per step; 0 = idle engine.")] = None,
    shape: Shape = "demo",
    model: Model = "llama",
    device: Device = "auto",
    threads: Threads = 1,
    checkpoint: Checkpoint = None,
    engine: Annotated[str, typer.Option(help="reference, or an installed vllm or sglang.")] = "reference",
    disaggregated: Annotated[
        bool, typer.Option("--disaggregated", help="Prefill in one process, decode in another.")
    ] = False,
) -> None:
    """Run a small LLM engine under load with the canary attached."""
    from canary_obs.demo.plan import DemoPlan

    if engine not in ("reference", "vllm", "sglang"):
        raise ConfigurationError("--engine", engine, "no such engine", "Use reference, vllm or sglang.")
    if engine != "reference" and disaggregated:
        rule = "--disaggregated joins two reference engines"
        raise ConfigurationError("--engine", engine, rule, "Leave out one of the two options.")
    settings: dict[str, Any] = {"perturb_seed": seed}
    if mode is not None:
        settings["mode"] = mode
    if perturb is not None:
        settings |= {"perturb": perturb, "perturb_enabled": True}
    if perturb_group is not None:
        settings["perturb_group"] = perturb_group
    if endpoint is not None:
        settings["endpoint"] = endpoint
    plan = DemoPlan(
        duration=duration, steps=steps, seed=seed, serve=serve, port=port, arrivals=arrivals, shape=shape,
        model=model, device=device, threads=threads, checkpoint=checkpoint, settings=settings,
    )  # fmt: skip
    if engine == "vllm":
        _demo_vllm(plan, json)
    elif engine == "sglang":
        _demo_sglang(plan, json)
    elif disaggregated:
        _demo_disaggregated(plan, json)
    else:
        _demo_reference(plan, json)


def _demo_reference(plan: DemoPlan, json: bool) -> None:
    from canary_obs.cli.demo_progress import DemoProgress
    from canary_obs.demo.reference import run_demo

    with DemoProgress() as progress:
        summary = run_demo(plan, _notify(json), progress)
    _print_summary(plan, summary, json)


def _demo_vllm(plan: DemoPlan, json: bool) -> None:
    from canary_obs.cli.demo_progress import DemoProgress
    from canary_obs.demo.vllm import run_vllm_demo

    # Not on standard output, where vLLM writes.
    with DemoProgress() as progress:
        summary = run_vllm_demo(plan, notify_stderr, progress)
    _print_summary(plan, summary, json)


def _demo_sglang(plan: DemoPlan, json: bool) -> None:
    from canary_obs.cli.demo_progress import DemoProgress
    from canary_obs.demo.sglang import run_sglang_demo

    with DemoProgress() as progress:
        summary = run_sglang_demo(plan, notify_stderr, progress)
    _print_summary(plan, summary, json)


def _demo_disaggregated(plan: DemoPlan, json: bool) -> None:
    from canary_obs.demo.disaggregated import DecodeFailed, run_disaggregated

    try:
        summary = run_disaggregated(plan, _notify(json))
    except DecodeFailed as failed:
        sys.exit(failed.exit_code)
    _print_summary(plan, summary, json)


def notify_stdout(text: str) -> None:
    """Print what a demo reports while it runs."""
    write_out(text + "\n")


def notify_stderr(text: str) -> None:
    """Print what a demo reports while it runs, where standard output is for one JSON object."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def _notify(json: bool) -> Any:
    return notify_stderr if json else notify_stdout


def _print_summary(plan: DemoPlan, summary: dict[str, Any], json: bool) -> None:
    from canary_obs.demo.plan import canary_config

    if json:
        write_out(jsonlib.dumps(summary) + "\n")
        return
    for name, value in summary.items():
        write_out(f"{name:>20}  {value}\n")
    write_out(f"{'settings':>20}  {masked(canary_config(plan))}\n")
