"""One real vLLM engine in this process, with access to its tensors and its canary."""

from __future__ import annotations

import gc
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from canary_obs.engines.vllm.adapter import VllmAdapter
from canary_obs.engines.vllm.worker import runtime_of
from canary_obs.records import Violation
from canary_obs.runtime.canary import CanaryRuntime
from canary_obs.runtime.report.snapshot import group_counters
from canary_obs.vocabulary import Phase, Reason
from tests.engines.vllm.storm.legs import ON_GPU

DEFAULTS: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 1024, "enforce_eager": True, "enable_prefix_caching": True,
    "max_num_seqs": 32, "max_num_batched_tokens": 256, "block_size": 32, "num_gpu_blocks_override": 500,
    "disable_log_stats": True, "gpu_memory_utilization": 0.1,
}  # fmt: skip

# Of latents in float32: where the CPU has AMX, vLLM would take the backend that wants bfloat16.
LATENT = {"attention_backend": "CPU_MLA"}


class Rig:
    """An LLM, its worker and the canary in it."""

    def __init__(self, model: Path, **engine: Any) -> None:
        from vllm import LLM

        start_quickly()
        # vLLM collects garbage eight times as it starts, each time through all that importing it has made.
        if not gc.get_freeze_count():
            gc.collect()
            gc.freeze()
        with _frozen():
            on_device = ON_GPU if torch.cuda.is_available() else {}
            self.llm = LLM(model=str(model), **(DEFAULTS | on_device | engine))
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.worker = self.core.model_executor.driver_worker.worker
        self.found: list[Violation] = []
        self._at_rest = False
        self.collect_from()

    def collect_from(self, canary: CanaryRuntime | None = None) -> None:
        """Collect what this canary's checks find, redetections too; by default the worker's canary."""
        self._canary = canary or runtime_of(self.worker)
        if self._canary is not None:
            keep = self._canary.delivery.deliver

            def deliver(found: list[Violation]) -> None:
                self.found += found
                keep(found)

            self._canary.delivery.deliver = deliver  # type: ignore[method-assign]

    @property
    def canary(self) -> CanaryRuntime:
        assert self._canary is not None, "this engine has no canary"
        return self._canary

    @property
    def adapter(self) -> VllmAdapter:
        adapter = self.canary._adapter
        assert isinstance(adapter, VllmAdapter)
        return adapter

    @property
    def runner(self) -> Any:
        return self.worker.model_runner

    def generate(self, prompts: list[list[int]], tokens: int = 16) -> list[list[int]]:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self.llm.generate(inputs, sampling, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def start(self, prompts: dict[str, list[int]], tokens: int = 40) -> None:
        """Queue requests; `step` moves them."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        for request, prompt in prompts.items():
            self.llm.llm_engine.add_request(request, {"prompt_token_ids": prompt}, sampling)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.llm.llm_engine.step()

    def finish(self) -> None:
        while self.llm.llm_engine.has_unfinished_requests():
            self.step()

    def blocks_of(self, request: str, group: int = 0) -> list[int]:
        """By the public id or the one vLLM made of it."""
        for name, blocks in self._blocks(group):
            if name.startswith(request):
                return list(blocks)
        raise KeyError(request)

    def _blocks(self, group: int) -> Iterator[tuple[str, Sequence[int]]]:
        if hasattr(self.runner, "requests"):
            return ((name, state.block_ids[group]) for name, state in self.runner.requests.items())
        return self.adapter.request_blocks(group)  # V2 has them on the device only

    def row_of(self, request: str) -> int:
        _, rows = self.block_table()
        return next(row for name, row in rows.items() if name.startswith(request))

    def block_table(self) -> tuple[Any, dict[str, int]]:
        """The first group's block table, which the next step copies from; rows by request."""
        if hasattr(self.runner, "req_states"):
            return self.runner.block_tables.block_tables[0].gpu, dict(self.runner.req_states.req_id_to_index)
        batch = self.runner.input_batch
        return batch.block_table[0].block_table.np, dict(batch.req_id_to_index)

    def fresh(self) -> None:
        """Forget cached blocks, records and violations: the next test starts clean."""
        self.finish()
        self.step()
        assert self.llm.reset_prefix_cache()
        self.canary.mark_ready()
        self.settle()
        self.found.clear()

    def settle(self) -> list[Violation]:
        """Everything checked, patrol and sweep included; all violations so far."""
        with nullcontext() if self._at_rest else self.adapter.hooks.lock:
            self.canary.check_everything()
        return self.found

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """No step and no patrol by the idle thread: damage taken back within is found by `settle` alone."""
        with self.adapter.hooks.lock:
            self._at_rest = True
            try:
                yield
            finally:
                self._at_rest = False

    def reasons(self) -> Counter[tuple[Phase, Reason]]:
        return Counter((violation.phase, violation.reason) for violation in self.found)

    def checks(self) -> int:
        groups = group_counters(self.canary.state, self.canary.counter_reader)
        return sum(sum(group.verified.values()) for group in groups.values())

    def layer_cache(self, group: int, layer: int) -> Any:
        """The KV tensor of a layer as vLLM holds it."""
        name = self.runner.kv_cache_config.kv_cache_groups[group].layer_names[layer]
        return self.runner.compilation_config.static_forward_context[name].kv_cache

    def draft_cache(self) -> Any:
        """The KV tensor of the draft model's first layer."""
        own = next(found for found in self.adapter.vllm_groups if found.draft)
        return self.runner.compilation_config.static_forward_context[own.layers[0]].kv_cache

    def idle_blocks(self, group: int = 0) -> list[int]:
        """Blocks in the prefix cache that no request uses, oldest first."""
        from vllm.v1.core.kv_cache_utils import get_group_id

        pool = self.core.scheduler.kv_cache_manager.block_pool
        return [
            block.block_id
            for block in pool.blocks
            if block.block_hash is not None and block.ref_cnt == 0 and get_group_id(block.block_hash) == group
        ]

    def scheduled_windows(self) -> tuple[int, int]:
        """Running tokens out of the window, and diverging, by the scheduler's lists; of groups the least."""
        running = self.core.scheduler.running
        managers = self.core.scheduler.kv_cache_manager.coordinator.single_type_managers
        groups = self.adapter.vllm_groups
        full = managers[next(group.number for group in groups if group.view.window is None)].req_to_blocks
        counts = []
        for group in groups:
            if group.view.window is None:
                continue
            lists, missing, diverging = managers[group.number].req_to_blocks, 0, 0
            for request in running:
                for at in range(request.num_computed_tokens):
                    block = lists[request.request_id][at // group.block_size]
                    other = full[request.request_id][at // group.block_size]
                    missing += block.is_null
                    diverging += not block.is_null and block.block_id != other.block_id
            counts.append((missing, diverging))
        return min(missing for missing, _ in counts), min(diverging for _, diverging in counts)

    def close(self) -> None:
        from vllm.distributed import cleanup_dist_env_and_memory

        from tests.engines.vllm.real.copying_connector import STORE

        if not vars(self):
            return
        STORE.clear()  # a test may have damaged it: the next engine would rightly be accused of its bytes
        with _frozen():
            self.core.shutdown()
            self.__dict__.clear()
            gc.collect()
            cleanup_dist_env_and_memory()
        gc.freeze()


@contextmanager
def _frozen() -> Iterator[None]:
    """What was frozen stays so, and nothing else: vLLM thaws all, and collects thrice through that."""
    freeze, unfreeze = gc.freeze, gc.unfreeze
    gc.freeze = gc.unfreeze = lambda: None
    try:
        yield
    finally:
        gc.freeze, gc.unfreeze = freeze, unfreeze


def keep_asynchronous(patch: Callable[..., None] = setattr) -> None:
    """vLLM turns asynchronous scheduling off on CPUs; from now on it stays as it was asked for."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def check_and_update_config(config: Any) -> None:
        wanted = config.scheduler_config.async_scheduling
        check(config)
        config.scheduler_config.async_scheduling = wanted

    patch(CpuPlatform, "check_and_update_config", staticmethod(check_and_update_config))


def start_quickly() -> None:
    """On a CPU: once, and here, what vLLM does for each engine, or in a process that imports it for that."""
    if torch.cuda.is_available():
        return
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform
    from vllm.triton_utils import dispatcher

    registry._run_in_subprocess = lambda inspect: inspect()  # the class of a kind of model
    if not hasattr(dispatcher, "kv_canary_register"):
        dispatcher.kv_canary_register = register = dispatcher.register_kernels

        def register_kernels(overrides: dict[str, Any]) -> None:
            if new := {name: how for name, how in overrides.items() if name not in dispatcher._registry}:
                register(new)  # goes through all modules

        dispatcher.register_kernels = register_kernels
        # Before numba is imported, as by an engine whose workers are elsewhere: vLLM cannot go through it.
        current_platform.register_triton_kernel_overrides()


def fork_processes() -> None:
    """On CPUs vLLM spawns its processes, each of which imports all of it: from now on they are forked.

    On GPUs it forks them as well, where it can. test_pod.py has spawned ones.
    """
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def check_and_update_config(config: Any) -> None:
        check(config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    CpuPlatform.check_and_update_config = staticmethod(check_and_update_config)


def prompts(count: int, *, seed: int = 0, shared: int = 200, groups: int = 4) -> list[list[int]]:
    """Prompts that share prefixes, `groups` of them, each `shared` tokens long."""
    draw = random.Random(seed)
    common = [[draw.randrange(4, 1024) for _ in range(shared)] for _ in range(groups)]
    return [
        common[number % groups] + [draw.randrange(4, 1024) for _ in range(draw.randrange(5, 60))]
        for number in range(count)
    ]


def count_sampled(rig: Rig) -> set[int]:
    """How many tokens a request got from a step, all numbers that occur from now on."""
    found: set[int] = set()
    scheduler = rig.core.scheduler
    update = scheduler.update_from_output

    def counted(scheduled: Any, output: Any) -> Any:
        found.update(map(len, output.sampled_token_ids))
        return update(scheduled, output)

    scheduler.update_from_output = counted
    return found
