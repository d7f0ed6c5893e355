"""`canary-obs bench sglang-gpu`."""

from __future__ import annotations

from typing import Annotated

import typer

from canary_obs.cli.bench import Context, Requests
from canary_obs.cli.bench_report import exit_with, print_result, write_json
from canary_obs.cli.options import Baseline, EngineShape, Output, Seed, require_sglang


def sglang_gpu(
    shape: EngineShape = "8b",
    engine: Annotated[
        list[str] | None, typer.Option(help="Engines to compare; none and log by default.")
    ] = None,
    load: Annotated[list[str] | None, typer.Option(help="Loads to run; all by default.")] = None,
    requests: Requests = 64,
    context: Context = 4096,
    steps: Annotated[int, typer.Option(min=8, help="Steps of the loads that decode.")] = 128,
    prefill: Annotated[int, typer.Option(min=64, help="Tokens of one prefill.")] = 8192,
    prefills: Annotated[int, typer.Option(min=1, help="Prefills per round.")] = 4,
    mixed: Annotated[int, typer.Option(min=1, help="Requests of the mixed load.")] = 128,
    tokens: Annotated[int | None, typer.Option(min=64, help="Tokens in the pool of each engine.")] = None,
    one_engine: Annotated[
        bool,
        typer.Option(help="none is the engine of log, attached and detached in turn: equal in all else."),
    ] = False,
    drafts: Annotated[bool, typer.Option(help="Draft with a model of one layer, on GPUs.")] = False,
    verify_on_hit: Annotated[bool, typer.Option(help="Compare prefix hits, too.")] = False,
    rounds: Annotated[int, typer.Option(min=2, help="Rounds in which every engine runs every load.")] = 4,
    seed: Seed = 1,
    output: Output = None,
    baseline: Baseline = None,
) -> None:
    """Loads of a real SGLang: with the canary at its defaults, with SGLang's own canary, and without."""
    require_sglang()
    from canary_obs.bench.load_figures import LOG, NONE
    from canary_obs.bench.sglang_gpu import SglangGpuPlan, run_sglang_gpu
    from canary_obs.bench.sglang_loads import LOADS, SglangLoads

    few = max(requests // 4, 1)
    loads = SglangLoads(
        requests=requests, context=context, few=few, few_context=context, steps=steps, prefill=prefill,
        prefills=prefills, mixed=mixed,
    )  # fmt: skip
    plan = SglangGpuPlan(
        shape=shape, engines=tuple(engine or (NONE, LOG)), loads=loads, names=tuple(load or LOADS),
        tokens=tokens or requests * (context + steps + 64) + prefill, rounds=rounds, seed=seed,
        one_engine=one_engine, drafts=drafts, verify_on_hit=verify_on_hit,
    )  # fmt: skip
    # Written after each round: a borrowed machine may be reclaimed before the end.
    result = run_sglang_gpu(plan, on_progress=lambda figures: write_json(output, figures))
    write_json(output, result.to_json())
    print_result(result, as_json=False)
    exit_with(result, baseline)
