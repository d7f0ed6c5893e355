"""What following an OffloadingConnector costs: `python -m tests.engines.vllm.real.load_cost [--device cuda]`.

Pairs of phases, without a canary and with one: each serves new prompts, which are stored, gives the device's
blocks up, and serves the prompts again, which loads them. Printed, as JSON: time of stores and loads, and
time on the engine's thread by part. On a CPU copies are made at once, by a stand-in.
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
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

BLOCK = {"cpu": 32, "cuda": 16}
GOAL = 1.02  # of the time without a canary
SEED = 1


class Clock:
    """Wall time of the methods that it wraps; what a wrapped method inside takes is not its own."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._inner = [0.0]

    def wrap(self, owner: Any, name: str, part: str) -> None:
        """Count the time of this method to a part."""
        original = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            started = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                spent = time.perf_counter() - started
                self.seconds[part] += spent - self._inner.pop()
                self._inner[-1] += spent

        setattr(owner, name, timed)


class Offloading:
    """An engine that offloads to host memory; its prompts are whole blocks of `tokens`, and one more."""

    def __init__(self, folder: Path, device: str, prompts: int, tokens: int) -> None:
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
            folder, "8b" if device == "cuda" else "tiny", SEED, enforce_eager=True, max_num_seqs=8,
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
        self.copied: list[tuple[str, float]] = []  # of each job that ended: path, seconds by vLLM's events
        self._follow_copies()

    def _follow_copies(self) -> None:
        worker, paths = self.worker, dict[int, str]()
        finished, submits = worker.get_finished, (worker.submit_store, worker.submit_load)

        def get_finished() -> Any:
            results = finished()
            self.copied += [(paths.pop(each.job_id), each.transfer_time or 0.0) for each in results]
            return results

        def submit(path: str, original: Any, job_id: int, *args: Any, **kwargs: Any) -> Any:
            paths[job_id] = path
            return original(job_id, *args, **kwargs)

        worker.get_finished = get_finished
        worker.submit_store, worker.submit_load = (
            partial(submit, path, original) for path, original in zip(("store", "load"), submits, strict=True)
        )

    def _on_host(self, tokens: int) -> dict[str, Any]:
        from tests.engines.vllm.real.host_offload import transfer_config

        config = transfer_config()
        config["kv_connector_extra_config"]["cpu_bytes_to_use"] = 1 << 28
        return config

    def new_prompts(self) -> list[list[int]]:
        return self.vllm.random_prompts(self._prompts, self.tokens + 1)

    def serve(self, prompt: list[int]) -> float:
        """Seconds to the first token, until the device is idle."""
        self.vllm.synchronize()
        started = time.perf_counter()
        self.vllm.add_requests([prompt], 1)
        self.vllm.run()
        self.vllm.synchronize()
        return time.perf_counter() - started

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
            yield canary
        finally:
            canary.detach()


def phase(engine: Offloading, rounds: int, clock: Clock) -> dict[str, Any]:
    """Seconds of each store and load, and on the engine's thread by part."""
    prompts, before = engine.new_prompts(), engine.loaded
    clock.seconds.clear()
    engine.copied.clear()
    stores = [engine.serve(prompt) for prompt in prompts]
    engine.forget()
    on_thread = {"store": dict(clock.seconds)}
    clock.seconds.clear()
    loads = []
    for _ in range(rounds):
        loads += [engine.serve(prompt) for prompt in prompts]
        engine.forget()
    on_thread["load"] = dict(clock.seconds)
    loaded = engine.loaded - before
    assert loaded == len(loads) * engine.tokens, f"{loaded} tokens were loaded"
    copied = {path: sum(seconds for each, seconds in engine.copied if each == path) for path in on_thread}
    return {"stores": stores, "loads": loads, "thread": on_thread, "copied": copied}


def measure(device: str, pairs: int, prompts: int, tokens: int, rounds: int) -> Iterator[dict[str, Any]]:
    """What was found so far, after each pair; the first one warms up."""
    from canary_obs.bench.environment import environment
    from canary_obs.engines.vllm.adapter import VllmAdapter
    from canary_obs.engines.vllm.connector_loads import ConnectorLoads
    from canary_obs.engines.vllm.offload_records import OffloadRecords
    from canary_obs.runtime.canary import CanaryRuntime
    from canary_obs.runtime.loads import Loads
    from canary_obs.runtime.report.snapshot import group_counters

    clock = Clock()
    clock.wrap(OffloadRecords, "_store", "records of what is stored")
    clock.wrap(OffloadRecords, "_load", "records of the copy")
    clock.wrap(Loads, "begin", "what lay there before")
    clock.wrap(Loads, "end", "judged")
    clock.wrap(VllmAdapter, "follow_output", "scheduler outputs followed")
    clock.wrap(ConnectorLoads, "begin_due", "what blocks are to hold, after the copy was submitted")
    clock.wrap(ConnectorLoads, "reported", "reports of loads followed")
    for name in ("before_write", "forward_launched", "before_forward", "after_forward", "after_step"):
        clock.wrap(CanaryRuntime, name, "checks of forwards")
    found: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    totals: Counter[str] = Counter()
    with TemporaryDirectory() as folder:
        engine = Offloading(Path(folder), device, prompts, tokens)
        clock.wrap(engine.worker, "submit_store", "vLLM submits")
        clock.wrap(engine.worker, "submit_load", "vLLM submits")
        for number in range(pairs + 1):
            for protected in (number % 2 == 0, number % 2 == 1):
                if protected:
                    with engine.protected() as canary:
                        result = phase(engine, rounds, clock)
                        canary.delivery.drain(5.0)
                        counters = group_counters(canary.state, canary.counter_reader)["full"]
                        totals["loads_compared"] += counters.loads_compared
                        totals["loads_left_out"] += counters.loads_left_out
                        totals["violations"] += canary.counter_reader.violations
                        totals["faults"] += canary.health.faults.total()
                else:
                    result = phase(engine, rounds, clock)
                if number:
                    found[protected].append(result)
            if number:
                plan = {"pairs": number, "prompts": prompts, "tokens": tokens, "rounds": rounds}
                yield {
                    "bench": "load_cost", "environment": environment(), "plan": plan,
                    "engine": engine.vllm.description(), **figures(found, tokens // BLOCK[device]), **totals,
                }  # fmt: skip
        engine.vllm.shutdown()


def figures(found: dict[bool, list[dict[str, Any]]], blocks: int) -> dict[str, Any]:
    """Medians of both sides, and of the ratios of pairs; time on the thread per block."""
    result: dict[str, Any] = {"goal": GOAL}
    for path in ("store", "load"):
        sides = {side: [median(each[f"{path}s"]) for each in found[side]] for side in (False, True)}
        copied = [
            each["copied"][path] / len(each[f"{path}s"]) for side in (False, True) for each in found[side]
        ]
        result[f"{path}: vLLM's copy, ms"] = round(median(copied) * 1e3, 3)
        ratios = [with_ / without for without, with_ in zip(sides[False], sides[True], strict=True)]
        result[f"{path} ms"] = {"without": _ms(sides[False]), "with": _ms(sides[True])}
        result[f"{path} ratio"] = {
            "median": round(median(ratios), 4),
            "pairs": [round(each, 4) for each in ratios],
        }
        parts: Counter[str] = Counter()
        for each in found[True]:
            parts.update(each["thread"][path])
        copies = blocks * sum(len(each[f"{path}s"]) for each in found[True])
        result[f"{path}: us per block on the thread"] = {
            name: round(seconds / copies * 1e6, 2) for name, seconds in sorted(parts.items())
        }
    return result


def _ms(seconds: list[float]) -> list[float]:
    return [round(each * 1e3, 3) for each in seconds]


def main() -> None:
    """Measure, and write what was found so far after each pair."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    os.environ.pop("KV_CANARY_MODE", None)
    os.environ.update(
        VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0",
        KV_CANARY_ENDPOINT="inproc",
    )  # fmt: skip
    sizes = {"prompts": 8, "tokens": 4096, "rounds": 3}
    if given.device == "cpu":
        os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_CI_ENV="1")
        sizes = {"prompts": 4, "tokens": 1024, "rounds": 3}
    for result in measure(given.device, given.pairs, **sizes):
        text = json.dumps(result, indent=1)
        if given.output:
            given.output.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    sys.exit(main())
