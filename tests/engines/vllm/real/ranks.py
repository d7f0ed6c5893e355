"""A real vLLM with two tensor-parallel ranks on a CPU: each is a process, and its canary answers calls."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from canary_obs.engines.vllm.worker import runtime_of
from canary_obs.healing.guard_rail import Limits
from canary_obs.records import Violation
from canary_obs.runtime.canary import CanaryRuntime
from canary_obs.runtime.report.snapshot import group_counters
from canary_obs.vocabulary import HealPolicy
from tests.engines.vllm.heal.false_findings import add_findings
from tests.engines.vllm.real.changed_words import change_words, held
from tests.engines.vllm.real.prefill import can_fork, spawned_on_v2
from tests.engines.vllm.real.rig import DEFAULTS, Rig, start_quickly
from tests.engines.vllm.storm.legs import ON_GPU
from tests.forked import Context

RANKS = 2
_ARRIVALS = "kv_canary_tests_arrivals"  # of a rank's canary
_CHANGES = "kv_canary_tests_changes"  # of a rank's SteadyStep


class RanksRig(Rig):
    """The engine core runs here, the workers elsewhere."""

    def __init__(self, model: Path, **engine: Any) -> None:
        from vllm import LLM, envs
        from vllm.v1.executor import multiproc_executor

        start_quickly()
        envs.disable_envs_cache()  # of an engine that this process has had
        with pytest.MonkeyPatch.context() as patch:  # other engines of this process have one rank
            cores = "|".join(str(core % (os.cpu_count() or 1)) for core in range(RANKS))
            patch.setenv("VLLM_CPU_OMP_THREADS_BIND", cores)
            for name, value in spawned_on_v2().items():
                patch.setenv(name, value)
            if can_fork():
                patch.setattr(multiproc_executor, "get_mp_context", Context)
            on_device = ON_GPU if torch.cuda.is_available() else {}
            ranks = {"tensor_parallel_size": RANKS}
            self.llm = LLM(model=str(model), **(DEFAULTS | on_device | ranks | engine))
        envs.disable_envs_cache()
        self.core = self.llm.llm_engine.engine_core.engine_core

    def of_ranks(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What a function of this module returns for each rank's worker."""
        found: list[Any] = self.core.model_executor.collective_rpc(function, args=args)
        return found

    def damage(self, rank: int, block: int) -> None:
        """Large enough to change what is answered."""
        self.of_ranks(damage, rank, block)

    def change_words(self, rank: int, block: int, slots: Sequence[int], count: int = 1) -> None:
        """Of the keys of one rank's block."""
        self.of_ranks(change_words_of, rank, block, slots, count)

    def held(self, block: int) -> list[list[torch.Tensor]]:
        """By rank, what the block's slots hold."""
        return self.of_ranks(held_by, block)

    def settle(self) -> list[Violation]:
        """Everything checked on every rank."""
        self.of_ranks(settle)
        return []

    def fresh(self) -> None:
        """Forget cached blocks and records."""
        self.finish()
        self.step()
        assert self.llm.reset_prefix_cache()
        self.of_ranks(mark_ready)
        self.settle()

    def blocks_of(self, request: str, group: int = 0) -> list[int]:
        """The blocks of a request that runs."""
        scheduler = self.core.scheduler
        name = next(one.request_id for one in scheduler.running if one.request_id.startswith(request))
        found: list[int] = scheduler.kv_cache_manager.get_block_ids(name)[group]
        return found

    def choose(self, policy: HealPolicy, limits: Limits) -> None:
        """On all ranks, as a service does."""
        self.of_ranks(choose, policy.value, tuple(limits))

    def release(self) -> None:
        """Bring all quarantined blocks back."""
        self.of_ranks(release)

    def report(self, rank: int, found: Sequence[Violation]) -> None:
        """One rank has found this."""
        self.of_ranks(report, rank, list(found))

    def counts(self) -> Counter[str]:
        """How often each action had each outcome; the first rank speaks for all, except of repairs."""
        first, *others = map(Counter, self.of_ranks(counts))
        assert not any(other - repairs for other, repairs in zip(others, self.repairs()[1:], strict=True))
        return Counter(first)

    def repairs(self) -> list[Counter[str]]:
        """By rank: how often it put a block's bytes back, or refused to."""
        return [
            Counter({action: number for action, number in own.items() if action.startswith("repair")})
            for own in self.of_ranks(counts)
        ]

    def healing(self) -> list[tuple[str, str | None]]:
        """By rank: the policy that is followed, and why it is not another one."""
        return self.of_ranks(healing)

    def faults(self) -> list[dict[str, int]]:
        """Of each rank's observer."""
        return self.of_ranks(faults)

    def changes(self) -> list[Counter[str]]:
        """By rank, since the last call: what the scheduler's outputs were taken to bring."""
        return self.of_ranks(changes)

    def arrivals(self) -> list[tuple[int, int, list[str]]]:
        """By rank, since the last call: slots of loads that were compared, and left out; what was found."""
        return self.of_ranks(arrivals)

    def close(self) -> None:
        """End the workers."""
        self.core.shutdown()
        self.__dict__.clear()


# In the workers ------------------------------------------------------------------------------------


def changes(worker: Any) -> Counter[str]:
    """By name of the Change."""
    steady, seen = canary_of(worker)._adapter._steady, Counter[str]()  # type: ignore[attr-defined]
    before: Counter[str] = steady.__dict__.pop(_CHANGES, seen)

    def counted(output: Any, events: Any) -> Any:
        found = type(steady).change(steady, output, events)
        seen[found.name] += 1
        return found

    steady.__dict__ |= {_CHANGES: seen, "change": counted}
    return before


def damage(worker: Any, rank: int, block: int) -> None:
    """Of one rank alone."""
    if worker.rank != rank:
        return
    runner = worker.model_runner
    layers = runner.kv_cache_config.kv_cache_groups[0].layer_names
    for name in layers:
        runner.compilation_config.static_forward_context[name].kv_cache[block].mul_(-3.0).add_(1.0)


def change_words_of(worker: Any, rank: int, block: int, slots: Sequence[int], count: int) -> None:
    """On one rank alone."""
    if worker.rank == rank:
        change_words(canary_of(worker), block, slots, count)


def held_by(worker: Any, block: int) -> list[torch.Tensor]:
    """The bytes of a block."""
    return held(canary_of(worker), block)


def settle(worker: Any) -> None:
    """Check everything."""
    canary = canary_of(worker)
    with canary._adapter.hooks.lock:  # type: ignore[attr-defined]
        canary.check_everything()


def mark_ready(worker: Any) -> None:
    """Forget records."""
    canary_of(worker).mark_ready()


def choose(worker: Any, policy: str, limits: tuple[int, float]) -> None:
    """This policy."""
    healing = canary_of(worker).healing
    healing._limits = Limits(*limits)
    healing.choose(HealPolicy(policy))


def release(worker: Any) -> None:
    """All blocks."""
    canary_of(worker).healing.release(None)


def report(worker: Any, rank: int, found: list[Violation]) -> None:
    """As if a check of this rank had found it."""
    if worker.rank == rank:
        add_findings(canary_of(worker), found)


def counts(worker: Any) -> dict[str, int]:
    """Actions with outcomes."""
    return {
        f"{action.value} {outcome.value}": count
        for action, outcomes in canary_of(worker).healing.counts.items()
        for outcome, count in outcomes.items()
        if count
    }


def healing(worker: Any) -> tuple[str, str | None]:
    """What is followed, and why."""
    status = canary_of(worker).healing.status
    return status.effective.value, status.why


def faults(worker: Any) -> dict[str, int]:
    """Of the observer."""
    return dict(canary_of(worker).health.faults)


def arrivals(worker: Any) -> tuple[int, int, list[str]]:
    """Everything is checked before."""
    canary = canary_of(worker)
    if not hasattr(canary, _ARRIVALS):
        setattr(canary, _ARRIVALS, (0, 0, found := list[Violation]()))
        deliver = canary.delivery.deliver
        canary.delivery.deliver = lambda rows: (found.extend(rows), deliver(rows))[1]  # type: ignore[method-assign]
    settle(worker)
    counters = group_counters(canary.state, canary.counter_reader)["full"]
    compared, left_out, found = getattr(canary, _ARRIVALS)
    setattr(canary, _ARRIVALS, (counters.loads_compared, counters.loads_left_out, found))
    reasons = sorted({f"{violation.phase} {violation.reason}" for violation in found})
    found.clear()
    return counters.loads_compared - compared, counters.loads_left_out - left_out, reasons


def canary_of(worker: Any) -> CanaryRuntime:
    """A rank's."""
    # A call with a function gets the wrapper that vLLM puts around its workers.
    found = runtime_of(getattr(worker, "worker", worker))
    assert found is not None
    return found
