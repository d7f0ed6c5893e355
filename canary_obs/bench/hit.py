"""`canary-obs bench hit`: what comparing a prefix hit adds to the time to first token of a real vLLM."""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from canary_kernels import layout
from canary_kernels.fingerprint import compare_slots, complete_slots
from canary_obs.bench.environment import environment
from canary_obs.bench.result import BenchResult, Measure
from canary_obs.bench.statistics import added_noise
from canary_obs.bench.vllm_canary import attached, detach
from canary_obs.bench.vllm_flips import flip_hit, incomplete
from canary_obs.demo.in_process_vllm import InProcessVllm
from canary_obs.engines.vllm.adapter import VllmAdapter
from canary_obs.runtime.canary import CanaryRuntime
from canary_obs.runtime.device.state import Group

GOAL = 0.01  # of the time to first token
_BLOCK_SIZE = {"cuda": 16, "cpu": 32}
_LOAD_PROMPT = 512  # tokens of each request that decodes meanwhile
_WARM_UP = 3  # pairs that are left out


@dataclass(frozen=True, slots=True, kw_only=True)
class HitPlan:
    """The engine, and the hits: each length is timed with each rest, in an idle and in a busy engine."""

    shape: str
    runner: str  # v1, v2
    hits: tuple[int, ...]  # tokens found in the prefix cache
    rests: tuple[int, ...]  # tokens of the prompt after them
    load: int  # requests that decode meanwhile in the busy engine
    pairs: int
    memory: float  # share of the GPU's memory that vLLM may use
    seed: int


def run_hit(plan: HitPlan, on_progress: Callable[[dict[str, Any]], None]) -> BenchResult:
    """Flip bits, which a canary that compares nothing would miss; then time hits with and without comparison.

    `on_progress` receives the figures so far, marked `unfinished`, after each row.
    """
    os.environ |= {"KV_CANARY_MODE": "log", "VLLM_USE_V2_MODEL_RUNNER": "1" if plan.runner == "v2" else "0"}
    os.environ["KV_CANARY_VERIFY_ON_HIT"] = "true"
    figures: dict[str, Any] = {"bench": "hit", "plan": asdict(plan), "environment": environment()}
    pairs = (plan.pairs + _WARM_UP) * len(plan.hits) * len(plan.rests)
    with TemporaryDirectory() as folder:
        vllm = InProcessVllm(
            Path(folder), plan.shape, plan.seed, enable_prefix_caching=True, max_num_seqs=plan.load + 8,
            max_model_len=max(max(plan.hits) + max(plan.rests), _LOAD_PROMPT + 16 * pairs) + 64,
            gpu_memory_utilization=plan.memory,
            block_size=_BLOCK_SIZE["cuda" if torch.cuda.is_available() else "cpu"],
        )  # fmt: skip
        detach(vllm)
        figures["engine"] = vllm.description()
        with attached(vllm) as (canary, adapter):
            timer = _Timer(vllm, canary, adapter, plan)
            figures["flips"] = {"hit": flip_hit(vllm, canary, adapter, timer.prefixes[0], plan.seed)}
            figures["rows"] = []
            for load in sorted({0, plan.load}):
                for row in timer.rows(load):
                    figures["rows"].append(row)
                    on_progress(figures | {"unfinished": "more rows to come"})
            vllm.synchronize()
            with adapter.paused():
                canary.delivery.drain(5.0)
            figures["observer_faults"] = canary.health.faults.total()
            figures["not_compared"] = [reason for source in (canary.hits, canary.state.owed)
                                       if source is not None for _, reason in source.reasons()]  # fmt: skip
        vllm.shutdown()
    return BenchResult(
        bench="hit",
        title="Time to first token of a prefix hit, with and without comparing its bytes",
        plan=asdict(plan),
        figures=figures,
        faults={
            "flips": incomplete(figures["flips"]),
            "observer_faults": figures["observer_faults"],
            "not_compared": figures["not_compared"],
        },
        measures={row["what"]: Measure(**row["measure"]) for row in figures["rows"]},
    )


class _Timer:
    """Times the first token of requests whose prompts begin with cached prefixes."""

    def __init__(
        self, vllm: InProcessVllm, canary: CanaryRuntime, adapter: VllmAdapter, plan: HitPlan
    ) -> None:
        self._vllm, self._canary, self._adapter, self._plan = vllm, canary, adapter, plan
        self._account = canary.hits
        self.prefixes = [vllm.random_prompts(1, length)[0] for length in plan.hits]
        self._random = random.Random(plan.seed)
        self.host_us: list[float] = []  # of showing a hit, launches included

    def rows(self, load: int) -> Iterator[dict[str, Any]]:
        """One row per hit and rest, while `load` other requests decode."""
        plan, vllm = self._plan, self._vllm
        for prefix in self.prefixes:
            vllm.add_requests([prefix], 1)
        vllm.run()
        first = vllm.latest_request + 1
        if load:
            room = vllm.config.model_config.max_model_len - _LOAD_PROMPT - 1
            vllm.add_requests(vllm.random_prompts(load, _LOAD_PROMPT), room)
            vllm.run(lambda outputs: len(outputs) == load)
        for prefix, rest in product(self.prefixes, plan.rests):
            yield self._row(prefix, rest, load)
        vllm.engine.abort_request([f"request-{number}" for number in range(first, first + load)])
        vllm.run()

    def _row(self, prefix: list[int], rest: int, load: int) -> dict[str, Any]:
        times: dict[bool, list[float]] = {False: [], True: []}
        self.host_us.clear()
        for number in range(self._plan.pairs + _WARM_UP):
            for compared in (False, True) if self._random.random() < 0.5 else (True, False):
                with self._comparison(compared):
                    seconds = self._first_token(prefix, rest, load)
                if number >= _WARM_UP:
                    times[compared].append(seconds)
        none = statistics.median(times[False])
        pairs = list(zip(times[False], times[True], strict=True))
        added = statistics.median(log - off for off, log in pairs)
        share = Measure(value=round(added / none, 5), noise=added_noise(pairs) / none, goal=GOAL)
        compare_us = self._compare_us(len(prefix))
        return {
            "what": f"{len(prefix)} + {rest} tokens, {load} requests decode",
            "hit": len(prefix), "rest": rest, "load": load,
            "ttft_ms_without": round(1e3 * none, 3),
            "ttft_ms_with": round(1e3 * statistics.median(times[True]), 3),
            "added_us": round(1e6 * added, 1),
            "measure": asdict(share),  # of the time to first token
            "compare_us": compare_us,
            "compare_share": None if compare_us is None else round(compare_us / 1e6 / none, 5),
            "host_us": round(statistics.median(self.host_us), 1),
            "each_ms": {
                name: [round(1e3 * seconds, 3) for seconds in times[compared]]
                for name, compared in (("without", False), ("with", True))
            },
        }  # fmt: skip

    def _first_token(self, prefix: list[int], rest: int, load: int) -> float:
        """Seconds from the request to its only token; everything but the rest of the prompt is a hit."""
        vllm, (tail,) = self._vllm, self._vllm.random_prompts(1, rest)
        cached: list[int] = []

        def answered(outputs: list[Any]) -> bool:
            own = [output for output in outputs if output.request_id == f"request-{vllm.latest_request}"]
            cached.extend(output.num_cached_tokens for output in own)
            return bool(own)

        vllm.synchronize()
        started = time.perf_counter()
        vllm.add_requests([prefix + tail], 1)
        vllm.run(answered)
        seconds = time.perf_counter() - started
        if cached != [len(prefix)]:
            raise RuntimeError(f"{cached} tokens were found in the prefix cache instead of {len(prefix)}")
        if not load:
            vllm.run()
        return seconds

    @contextmanager
    def _comparison(self, compared: bool) -> Iterator[None]:
        hits, account = self._adapter._block_changes.hits, self._account
        assert account is not None, "KV_CANARY_VERIFY_ON_HIT is on"
        original = hits.report

        def timed(*given: Any) -> None:
            started = time.perf_counter()
            original(*given)
            self.host_us.append(1e6 * (time.perf_counter() - started))

        self._canary.hits = account if compared else None
        if compared:
            account.start()  # what joined meanwhile was not asked for
        vars(hits)["report"] = timed if compared else lambda *_: None
        try:
            yield
        finally:
            del vars(hits)["report"]
            self._canary.hits = account
            account.start()

    def _compare_us(self, tokens: int) -> float | None:
        """Microseconds of the comparison alone, in blocks anywhere in the pool; None = no GPU."""
        if not torch.cuda.is_available():
            return None
        from canary_obs.bench.kernels import device_us

        return round(sum(device_us(self._compare(group, tokens)) for group in self._canary.state.groups), 1)

    def _compare(self, group: Group, tokens: int) -> Callable[[], None]:
        size = self._vllm.config.cache_config.block_size
        blocks = torch.randperm(group.view.num_slots // size, device=group.memory.device)[: tokens // size]
        slots = (blocks[:, None] * size + torch.arange(size, device=group.memory.device)).flatten()
        real = group.buffers
        records = torch.zeros_like(real.records)
        records[:, layout.IDENTITY] = layout.identity_of(0, 0, layout.RecordState.PENDING)
        spare = replace(
            real, records=records, counters=torch.zeros_like(real.counters),
            violations=torch.zeros_like(real.violations),
        )  # fmt: skip
        complete_slots(group.backend, spare, group.plan, slots)
        return partial(compare_slots, group.backend, spare, group.plan, slots, layout.Phase.HIT)
