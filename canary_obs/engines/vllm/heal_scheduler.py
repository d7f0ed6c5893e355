"""Heals between steps: damage comes with a step's results, and what was done leaves with the next step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from canary_obs.engines.toolkit.method_patches import MethodPatches
from canary_obs.engines.vllm.forward_count import FORWARDS_ATTRIBUTE
from canary_obs.engines.vllm.heal_actions import VllmActions
from canary_obs.engines.vllm.heal_link import DAMAGE_ATTRIBUTE, HEALS_ATTRIBUTE
from canary_obs.engines.vllm.heal_ranks import RANKS_ATTRIBUTE, hear_all_ranks
from canary_obs.engines.vllm.heal_rehearsal import rehearse_healing
from canary_obs.engines.vllm.scheduler_reports import log_fault
from canary_obs.healing.damage import Damage
from canary_obs.healing.healer import Healer
from canary_obs.healing.lineage import Lineage
from canary_obs.healing.messages import DamageMessage
from canary_obs.vocabulary import HealPolicy

HEALER_ATTRIBUTE = "_kv_canary_healer"  # of Scheduler: its SchedulerHealer, once a policy was chosen
PATCHES_ATTRIBUTE = "_kv_canary_heal_patches"  # of Scheduler or its class: restored at detach


class SchedulerHealer:
    """Healing of one scheduler."""

    def __init__(self, scheduler: Any, message: DamageMessage) -> None:
        self._actions = VllmActions(scheduler)
        self._lineage = Lineage(self._actions.is_cached)
        self._healer = Healer(self._actions, self._lineage, message.limits)
        self._scheduler = scheduler
        self._problem = rehearse_healing(scheduler)
        self._message = message  # the last one of the rank that speaks for all
        patches: MethodPatches = getattr(scheduler, PATCHES_ATTRIBUTE)
        self._follow_blocks(patches)
        if self._problem is None and scheduler.parallel_config.world_size > 1:
            hear_all_ranks(patches, scheduler, lambda: self._healer.policy is not HealPolicy.OFF)
        for request in scheduler.requests.values():
            self._follow(request, len(request.block_hashes) * self._actions.key_tokens)
        cached = self._actions.cached_keys()
        if any(key not in self._lineage for key in cached):
            self._lineage.older = frozenset(cached)

    def receive(self, message: DamageMessage | None, others: Sequence[Damage] = ()) -> None:
        """Do what a worker's message asks for, before the results that it came with are given out.

        `others`: what other ranks found.
        """
        self._message = message or self._message._replace(damages=(), releases=None)
        damages = (*self._message.damages, *others)
        self._healer.receive(self._message._replace(damages=damages), self._problem)

    def given_out(self, output: Any, outputs: dict[int, Any]) -> None:
        """The results of this scheduler output are given out."""
        number = getattr(output, FORWARDS_ATTRIBUTE, None)
        if number is not None:
            self._actions.given_out = number
        self._actions.inform_clients(outputs)

    def report(self, output: Any) -> None:
        """Attach what was done since the last report, if there is any."""
        self._actions.note_begun(output)
        if (message := self._healer.report()) is not None:
            setattr(output, HEALS_ATTRIBUTE, message)

    # What is cached --------------------------------------------------------------------------------

    def _follow_blocks(self, patches: MethodPatches) -> None:
        for pool in self._actions.pools:
            patches.wrap(pool, "cache_full_blocks", self._around_full)
            if hasattr(pool, "cache_partial_block"):
                patches.wrap(pool, "cache_partial_block", self._around_partial)
            patches.wrap(pool, "reset_prefix_cache", partial(self._around_reset, pool))
        patches.wrap(self._scheduler, "_free_request", self._around_free)

    def _around_full(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def cache_full_blocks(
            request: Any, blocks: Any, num_cached_blocks: int, num_full_blocks: int, block_size: int,
            *rest: Any, **more: Any,
        ) -> Any:  # fmt: skip
            if request.request_id in self._actions.barred:
                return None
            result = original(request, blocks, num_cached_blocks, num_full_blocks, block_size, *rest, **more)
            self._follow(request, num_full_blocks * block_size)
            return result

        return cache_full_blocks

    def _around_partial(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def cache_partial_block(request: Any, block: Any, num_tokens: int, *rest: Any, **more: Any) -> Any:
            if request.request_id in self._actions.barred:
                return None
            key = original(request, block, num_tokens, *rest, **more)
            if key is not None:
                self._follow_partial(request, bytes(key[:-4]), num_tokens)
            return key

        return cache_partial_block

    def _around_free(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def free_request(request: Any, *rest: Any, **more: Any) -> Any:
            self._actions.note_finished(request)
            return original(request, *rest, **more)

        return free_request

    def _around_reset(self, pool: Any, original: Callable[..., Any]) -> Callable[..., Any]:
        def reset_prefix_cache() -> Any:
            # vLLM refuses to reset while any block has a reference, as one in quarantine has.
            out = [pool.blocks[number] for number in self._quarantined(pool)]
            pool.free_blocks(out)
            try:
                return original()
            finally:
                pool.touch(out)

        return reset_prefix_cache

    def _quarantined(self, pool: Any) -> list[int]:
        pools = self._actions.pools_of_groups
        return [number for group, number in self._healer.quarantined if pools[group] is pool]

    def _follow(self, request: Any, tokens: int) -> None:
        try:
            hashes = request.block_hashes
            self._lineage.follow(hashes, min(tokens // self._actions.key_tokens, len(hashes)))
        except Exception as error:  # noqa: BLE001 - vLLM's scheduler must go on
            log_fault(self._scheduler, "the lineage of cached blocks", error)

    def _follow_partial(self, request: Any, key: bytes, tokens: int) -> None:
        whole = tokens // self._actions.key_tokens
        self._follow(request, tokens)
        try:
            self._lineage.extend(request.block_hashes[whole - 1] if whole else None, key)
        except Exception as error:  # noqa: BLE001 - vLLM's scheduler must go on
            log_fault(self._scheduler, "the lineage of cached blocks", error)


def heal_all(patches: MethodPatches, schedulers: type) -> None:
    """Let workers ask for healing of every scheduler of this class, until `patches` are restored."""
    patches.set(schedulers, PATCHES_ATTRIBUTE, patches)
    patches.wrap(schedulers, "update_from_output", _around_update)


def heal_one(patches: MethodPatches, scheduler: Any) -> None:
    """Let workers ask for healing of this scheduler, until `patches` are restored."""
    patches.set(scheduler, PATCHES_ATTRIBUTE, patches)
    patches.set(scheduler, HEALER_ATTRIBUTE, None)
    update = scheduler.update_from_output

    def unbound(_: Any, *arguments: Any) -> Any:
        return update(*arguments)

    def update_from_output(*arguments: Any) -> Any:
        return bound(scheduler, *arguments)

    bound = _around_update(unbound)
    patches.wrap(scheduler, "update_from_output", lambda _: update_from_output)


def _around_update(original: Callable[..., Any]) -> Callable[..., Any]:
    def update_from_output(scheduler: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        message = getattr(model_runner_output, DAMAGE_ATTRIBUTE, None)
        others = getattr(model_runner_output, RANKS_ATTRIBUTE, ())
        healer: SchedulerHealer | None = scheduler.__dict__.get(HEALER_ATTRIBUTE)
        if message is not None or others:
            healer = _received(scheduler, healer, message, others)
        outputs = original(scheduler, scheduler_output, model_runner_output)
        if healer is not None:
            try:
                healer.given_out(scheduler_output, outputs)
            except Exception as error:  # noqa: BLE001 - vLLM's scheduler must go on
                log_fault(scheduler, "healing", error)
        return outputs

    return update_from_output


def _received(
    scheduler: Any, healer: SchedulerHealer | None, message: DamageMessage | None, others: Sequence[Damage]
) -> SchedulerHealer | None:
    try:
        if healer is None and message is not None:
            healer = SchedulerHealer(scheduler, message)
            setattr(scheduler, HEALER_ATTRIBUTE, healer)
        if healer is not None:
            healer.receive(message, others)
    except Exception as error:  # noqa: BLE001 - vLLM's scheduler must go on
        log_fault(scheduler, "healing", error)
    return healer


def send_heals(scheduler: Any, output: Any) -> None:
    """Let what was done travel to every worker."""
    healer: SchedulerHealer | None = scheduler.__dict__.get(HEALER_ATTRIBUTE)
    if healer is not None:
        healer.report(output)
