"""Damage that any tensor-parallel rank finds, on the results that vLLM gives to its scheduler.

vLLM takes the results of one rank, unless an aggregator of outputs asks for all: that is how its KV
connectors hear of every rank, and how this does.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from canary_obs.engines.toolkit.method_patches import MethodPatches
from canary_obs.engines.vllm.heal_link import DAMAGE_ATTRIBUTE, RESULTS
from canary_obs.healing.damage import Damage

RANKS_ATTRIBUTE = "kv_canary_damage_of_ranks"  # of ModelRunnerOutput: damages that other ranks found


class RankDamages:
    """An aggregator of the outputs of all ranks, in front of the one that vLLM has, if any."""

    def __init__(self, own: Any) -> None:
        self._own = own

    def aggregate(self, outputs: list[Any], output_rank: int = 0) -> Any:
        """The output of `output_rank`, with what the others found; `outputs` have it in its place."""
        result = outputs[output_rank]
        if self._own is not None:
            result = self._own.aggregate(outputs, output_rank=output_rank)
        found = damages_of(outputs, output_rank)
        if found and result is not None:
            result = copy.copy(result)  # vLLM shares one empty output
            setattr(result, RANKS_ATTRIBUTE, found)
            outputs[output_rank] = result  # vLLM's aggregator for encoder caches comes after, and reads these
        return result


def damages_of(outputs: Sequence[Any], output_rank: int) -> tuple[Damage, ...]:
    """What ranks other than this one found."""
    messages = [
        getattr(output, DAMAGE_ATTRIBUTE, None) for rank, output in enumerate(outputs) if rank != output_rank
    ]
    return tuple(damage for message in messages if message is not None for damage in message.damages)


def hear_all_ranks(patches: MethodPatches, scheduler: Any, wanted: Callable[[], bool]) -> None:
    """While `wanted` says so, take the results of each step from all ranks of the scheduler's executor."""
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    config = scheduler.vllm_config

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def collective_rpc(executor: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
            if method in RESULTS and executor.vllm_config is config and wanted():
                kwargs["kv_output_aggregator"] = RankDamages(kwargs.get("kv_output_aggregator"))
            return original(executor, method, *args, **kwargs)

        return collective_rpc

    patches.wrap(MultiprocExecutor, "collective_rpc", make)
