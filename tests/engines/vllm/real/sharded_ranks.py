"""An engine of two ranks that share each request's tokens; what its workers do when they are called."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from canary_obs.engines.vllm.worker import attach_to_worker, detach_from_worker, runtime_of
from canary_obs.records import Violation
from canary_obs.runtime.device.byte_address import locate_byte
from canary_obs.runtime.report.snapshot import group_counters
from canary_obs.vocabulary import Phase, Reason
from tests.engines.vllm.real.ranks import RanksRig, canary_of

_WATCHED = "kv_canary_tests_found"  # of a rank's canary
BLOCK = 32  # tokens of one rank


class Finding(NamedTuple):
    """What a rank found, and where."""

    phase: Phase
    reason: Reason
    slot: int
    position: int


class Checked(NamedTuple):
    """What one rank's canary did so far."""

    state: str
    reasons: tuple[str, ...]
    groups: tuple[str, ...]
    verified: int
    hashed: int
    coverage: float
    protected: int  # bytes
    allocated: int
    faults: dict[str, int]


class ShardedRig(RanksRig):
    """Tokens lie on its ranks in turn."""

    def __init__(self, model: Path, interleave: int = 1, **engine: Any) -> None:
        self.interleave = interleave
        if not torch.cuda.is_available():
            engine["worker_extension_cls"] = "tests.engines.vllm.real.sharded_attention.OfWorkers"
        super().__init__(
            model, decode_context_parallel_size=2, cp_kv_cache_interleave_size=interleave, **engine
        )

    def without_canary(self, act: Callable[[], Any]) -> Any:
        """What `act` returns while the workers have none; the prefix cache is empty before and after."""
        self.of_ranks(detach)
        assert self.llm.reset_prefix_cache()
        found = act()
        assert self.llm.reset_prefix_cache()
        self.of_ranks(attach)
        self.step()
        self.fresh()
        return found

    def checked(self) -> list[Checked]:
        """By rank."""
        return [Checked(*found) for found in self.of_ranks(checked)]

    def new_findings(self) -> list[set[Finding]]:
        """By rank, since the last call, after everything was checked."""
        return [{Finding(*one) for one in found} for found in self.of_ranks(new_findings)]

    def flip(self, rank: int, slot: int) -> None:
        """One bit of the last layer, in a slot of this rank."""
        self.of_ranks(flip, rank, slot)


# In the workers ------------------------------------------------------------------------------------


def detach(worker: Any) -> None:
    """Restore vLLM."""
    detach_from_worker(worker.worker)
    assert runtime_of(worker.worker) is None


def attach(worker: Any) -> None:
    """Again."""
    attach_to_worker(worker.worker)


def checked(worker: Any) -> Checked:
    """Of this rank."""
    canary = canary_of(worker)
    counters = group_counters(canary.state, canary.counter_reader)
    state, reasons = canary.verdict()
    infos = [group.info() for group in canary.state.groups]
    return Checked(
        state=state.value, reasons=tuple(map(str, reasons)), groups=tuple(info.name for info in infos),
        verified=sum(sum(group.verified.values()) for group in counters.values()),
        hashed=sum(sum(group.hashed.values()) for group in counters.values()),
        coverage=canary.state.coverage, faults=dict(canary.health.faults),
        protected=sum(info.slots * info.protected_slot_bytes for info in infos),
        allocated=sum(
            {
                cache.untyped_storage().data_ptr(): cache.untyped_storage().nbytes()
                for cache in worker.worker.model_runner.kv_caches
            }.values()
        ),
    )  # fmt: skip


def new_findings(worker: Any) -> list[Finding]:
    """Redetections too."""
    canary = canary_of(worker)
    if not hasattr(canary, _WATCHED):
        setattr(canary, _WATCHED, found := list[Violation]())
        deliver = canary.delivery.deliver
        canary.delivery.deliver = lambda rows: (found.extend(rows), deliver(rows))[1]  # type: ignore[method-assign]
    with canary._adapter.hooks.lock:  # type: ignore[attr-defined]
        canary.check_everything()
    found = getattr(canary, _WATCHED)
    new = [Finding(one.phase, one.reason, one.slot, one.position) for one in found]
    found.clear()
    return new


def flip(worker: Any, rank: int, slot: int) -> None:
    """On one rank alone."""
    if worker.rank == rank:
        (group,) = canary_of(worker).state.groups
        locate_byte(group.view.sources[-1], slot, 5).flip(4)
