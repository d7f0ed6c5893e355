"""What following an OffloadingConnector costs: `python -m tests.engines.vllm.real.load_cost [--device cuda]`.

Pairs of phases, without a canary and with one, on a GPU each pair on one core of the host: each serves new
prompts, which are stored, gives the device's blocks up, and serves the prompts again, which loads them.
Printed, as JSON: time of stores and loads, of a load's legs, and on the engine's thread by part and leg. On a
CPU copies are made at once, by a stand-in.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

from tests.engines.vllm.real.cost_clock import Clock, Copies, Served, legs_of, of_path

BLOCK = {"cpu": 32, "cuda": 16}
PATHS = "store", "load"
GOAL = 1.02  # of the time without a canary
SEED = 1


class Offloading:
    """An engine that offloads to host memory; its prompts are whole blocks of `tokens`, and one more."""

    def __init__(
        self, folder: Path, device: str, prompts: int, tokens: int, clock: Clock, *, eager: bool
    ) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        from canary_obs.demo.in_process_vllm import InProcessVllm

        self._prompts, self.tokens = prompts, tokens
        how: dict[str, Any] = {"gpu_memory_utilization": 0.1, "kv_transfer_config": self._on_host(tokens)}
        if device == "cuda":
            extra = {"cpu_bytes_to_use": 8 << 30}
            transfer = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
            how = {
                "gpu_memory_utilization": 0.6,
                "kv_transfer_config": transfer | {"kv_connector_extra_config": extra},
            }
        else:
            how["num_gpu_blocks_override"] = prompts * tokens // BLOCK[device] + 100
        self.vllm = InProcessVllm(
            folder, "8b" if device == "cuda" else "tiny", SEED, enforce_eager=eager, max_num_seqs=8,
            block_size=BLOCK[device], max_model_len=tokens + 64, max_num_batched_tokens=max(tokens + 64, 256),
            **how,
        )  # fmt: skip
        self.worker = get_kv_transfer_group().connector_worker.worker
        self.loaded = 0  # tokens
        connector = self.vllm.core.scheduler.connector
        allocated = connector.update_state_after_alloc

        def update_state_after_alloc(request: Any, blocks: Any, count: int) -> Any:
            self.loaded += count
            return allocated(request, blocks, count)

        connector.update_state_after_alloc = update_state_after_alloc
        self.copies, self.clock = Copies(self.worker, self.vllm.runner.get_model()), clock
        clock.marks = self.copies.marks

    def _on_host(self, tokens: int) -> dict[str, Any]:
        from tests.engines.vllm.real.host_offload import transfer_config

        config = transfer_config()
        config["kv_connector_extra_config"]["cpu_bytes_to_use"] = 1 << 28
        return config

    def new_prompts(self) -> list[list[int]]:
        return self.vllm.random_prompts(self._prompts, self.tokens + 1)

    def serve(self, prompt: list[int]) -> Served:
        """Serve it to its first token, and until the device is idle."""
        self.vllm.synchronize()
        self.clock.seconds.clear()
        self.copies.marks.clear()
        started = time.perf_counter()
        self.vllm.add_requests([prompt], 1)
        self.vllm.run()
        answered = time.perf_counter()
        self.vllm.synchronize()
        idle = time.perf_counter()
        legs = legs_of(started, self.copies.marks, answered, idle)
        return Served(idle - started, dict(self.clock.seconds), legs)

    def forget(self) -> None:
        """Let stores end, and give up the blocks of the device."""
        for _ in range(4):
            self.serve(self.vllm.random_prompts(1, 5)[0])
        while not self.vllm.core.reset_prefix_cache():
            self.serve(self.vllm.random_prompts(1, 5)[0])

    @contextmanager
    def protected(self) -> Iterator[Any]:
        """With a canary at its defaults."""
        from canary_obs import CanaryConfig, Mode, install_canary
        from canary_obs.engines.vllm.in_process import adapter_for_llm

        adapter = adapter_for_llm(SimpleNamespace(llm_engine=self.vllm.engine))
        canary = install_canary(adapter, CanaryConfig(mode=Mode.LOG, endpoint="inproc"))
        assert canary is not None
        canary.mark_ready()
        try:
            yield canary, adapter
        finally:
            canary.detach()


def phase(engine: Offloading, rounds: int) -> dict[str, Any]:
    """What became of each prompt as it was stored and loaded, and vLLM's copies, in seconds."""
    prompts, before = engine.new_prompts(), engine.loaded
    engine.copies.ended.clear()
    stores = [engine.serve(prompt) for prompt in prompts]
    engine.forget()
    loads = []
    for _ in range(rounds):
        loads += [engine.serve(prompt) for prompt in prompts]
        engine.forget()
    loaded = engine.loaded - before
    assert loaded == len(loads) * engine.tokens, f"{loaded} tokens were loaded"
    copied = {path: sum(seconds for each, seconds in engine.copies.ended if each == path) for path in PATHS}
    return {"store": stores, "load": loads, "copied": copied}


def measure(
    device: str, pairs: int, *, prompts: int, tokens: int, rounds: int, eager: bool
) -> Iterator[dict[str, Any]]:
    """What was found so far, after each pair; the first one warms up."""
    from canary_obs.bench.environment import environment
    from canary_obs.bench.shared_core import take_core
    from canary_obs.engines.vllm import output_reports
    from canary_obs.engines.vllm.adapter import VllmAdapter
    from canary_obs.engines.vllm.block_changes import BlockChanges
    from canary_obs.engines.vllm.cached_blocks import CachedBlocks
    from canary_obs.engines.vllm.connector_loads import ConnectorLoads
    from canary_obs.engines.vllm.connector_reports import ConnectorReports
    from canary_obs.engines.vllm.offload_records import OffloadRecords
    from canary_obs.engines.vllm.step_hooks import StepHooks
    from canary_obs.runtime.canary import CanaryRuntime
    from canary_obs.runtime.loads import Loads
    from canary_obs.runtime.report.snapshot import group_counters
    from canary_obs.runtime.slot_hooks import SlotHooks
    from canary_obs.runtime.taint.report import TaintReporter

    clock = Clock()
    clock.wrap(VllmAdapter, "follow_output", "scheduler outputs followed")
    clock.wrap(StepHooks, "begin_forward", "views built")
    clock.wrap(BlockChanges, "report", "changes of blocks")
    clock.wrap(ConnectorLoads, "begin_step", "loads begun")
    clock.wrap(SlotHooks, "before_load", "compared before")
    clock.wrap(ConnectorReports, "follow", "what the connector is to do")
    clock.wrap(CachedBlocks, "apply", "cached blocks followed")
    clock.wrap(CachedBlocks, "catch_up", "cached blocks followed")
    clock.wrap(output_reports, "attach_reports", "reported by the scheduler")
    clock.wrap(OffloadRecords, "_store", "records of what is stored")
    clock.wrap(OffloadRecords, "_load", "records of the copy")
    clock.wrap(TaintReporter, "follow", "requests and copies followed")
    clock.wrap(Loads, "begin", "what lay there before")
    clock.wrap(Loads, "end", "judged")
    clock.wrap(ConnectorLoads, "begin_due", "what blocks are to hold, after the copy was submitted")
    clock.wrap(ConnectorLoads, "reported", "reports of loads followed")
    for name in ("before_write", "forward_launched", "before_forward", "after_forward", "after_step"):
        clock.wrap(CanaryRuntime, name, f"checks of forwards, {name}")
    found: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    totals: Counter[str] = Counter()
    with TemporaryDirectory() as folder:
        engine = Offloading(Path(folder), device, prompts, tokens, clock, eager=eager)
        clock.wrap(engine.worker, "submit_store", "vLLM submits")
        clock.wrap(engine.worker, "submit_load", "vLLM submits")
        for number in range(pairs + 1):
            take_core(number)
            for protected in (number % 2 == 0, number % 2 == 1):
                if protected:
                    with engine.protected() as (canary, adapter):
                        result = phase(engine, rounds)
                        with adapter.paused():
                            canary.delivery.drain(5.0)
                        counters = group_counters(canary.state, canary.counter_reader)["full"]
                        totals["loads_compared"] += counters.loads_compared
                        totals["loads_left_out"] += counters.loads_left_out
                        totals["violations"] += canary.counter_reader.violations
                        totals["faults"] += canary.health.faults.total()
                else:
                    result = phase(engine, rounds)
                if number:
                    found[protected].append(result)
            if number:
                sizes = {"prompts": prompts, "tokens": tokens, "rounds": rounds}
                plan = {"pairs": number, **sizes, "eager": eager}
                yield {
                    "bench": "load_cost", "environment": environment(), "plan": plan,
                    "engine": engine.vllm.description(), **figures(found, tokens // BLOCK[device]), **totals,
                }  # fmt: skip
        engine.vllm.shutdown()


def figures(found: dict[bool, list[dict[str, Any]]], blocks: int) -> dict[str, Any]:
    """Of both paths."""
    result: dict[str, Any] = {"goal": GOAL}
    for path in PATHS:
        sides = {side: [each[path] for each in found[side]] for side in (False, True)}
        copied = [each["copied"][path] / len(each[path]) for side in (False, True) for each in found[side]]
        result[f"{path}: vLLM's copy, ms"] = round(median(copied) * 1e3, 3)
        result |= of_path(path, sides[False], sides[True], blocks)
    return result


def main() -> None:
    """Measure, and write what was found so far after each pair."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs (a CPU has none)")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    os.environ.pop("KV_CANARY_MODE", None)
    os.environ.update(
        VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0",
        KV_CANARY_ENDPOINT="inproc",
    )  # fmt: skip
    sizes = {"prompts": 8, "tokens": 4096, "rounds": 1}  # short phases: the host's speed changes
    if given.device == "cpu":
        os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_CI_ENV="1")
        sizes = {"prompts": 4, "tokens": 1024, "rounds": 3}
    eager = given.eager or given.device == "cpu"
    for result in measure(given.device, given.pairs, eager=eager, **sizes):
        text = json.dumps(result, indent=1)
        if given.output:
            given.output.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    sys.exit(main())
