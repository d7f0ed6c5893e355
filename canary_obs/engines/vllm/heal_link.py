"""A worker's way to vLLM's scheduler and back: damage leaves with a step's results."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from canary_obs.engine_api.healing import Healed, Reached
from canary_obs.engine_api.observer import Observer
from canary_obs.engines.toolkit.block_slots import give_up, slots_of
from canary_obs.engines.toolkit.method_patches import MethodPatches
from canary_obs.engines.toolkit.reached_damage import reached_damage
from canary_obs.engines.vllm.forward_count import ForwardCount
from canary_obs.engines.vllm.groups import VllmGroup
from canary_obs.engines.vllm.window_tables import NULL_BLOCK
from canary_obs.healing.damage import damage_of
from canary_obs.healing.guard_rail import Limits
from canary_obs.healing.messages import DamageMessage, DamageOutbox
from canary_obs.records import Violation
from canary_obs.runtime.device.uploads import uploaded
from canary_obs.vocabulary import HealPolicy, Reason

DAMAGE_ATTRIBUTE = "kv_canary_damage"  # of ModelRunnerOutput: a DamageMessage
HEALS_ATTRIBUTE = "kv_canary_heals"  # of SchedulerOutput: a HealsMessage
RESULTS = ("execute_model", "sample_tokens")  # methods of a worker that return a step's results


class HealLink:
    """HealingLink of one worker. Nothing is wrapped before a policy other than OFF is chosen."""

    def __init__(
        self, groups: Mapping[str, VllmGroup], forwards: ForwardCount, worker: Any, device: torch.device
    ) -> None:
        self._groups, self._forwards, self._worker, self._device = groups, forwards, worker, device
        # One rank of those that a scheduler decides for reports what it did.
        self._speaks = int(getattr(worker, "rank", 0)) == 0
        self._patches: MethodPatches | None = None  # while attached
        self._wrapped = False
        self._heard = self._speaks  # the scheduler takes the results of this rank
        self._outbox = DamageOutbox()
        self._healed: Healed | None = None

    def attach(self, patches: MethodPatches) -> None:
        """`patches` are restored at detach."""
        self._patches, self._wrapped = patches, False

    def listen(self, healed: Healed) -> None:
        """Call `healed` with what the scheduler reports."""
        self._healed = healed

    def choose(self, policy: HealPolicy, limits: Limits) -> None:
        """The scheduler hears of it with the next results of a step."""
        if policy is self._outbox.policy is HealPolicy.OFF:
            return
        self._outbox.choose(policy, limits)
        self._heard = self._speaks
        if not self._wrapped and self._patches is not None:
            self._wrapped = True
            for name in RESULTS:
                if hasattr(self._worker, name):
                    self._patches.wrap(self._worker, name, self._around_results)

    def release(self, blocks: Sequence[int] | None) -> None:
        """The scheduler hears of it with the next results of a step."""
        self._outbox.release(blocks)

    def damaged(self, found: Sequence[Violation], incident: str, step: int) -> None:
        """Put findings into the engine's terms. Scales belong to every block, and cannot be healed."""
        newest = self._forwards.number
        for violation in found:
            if (group := self._groups.get(violation.group)) is not None:
                forward = newest - (step - violation.step)
                damage = damage_of(
                    violation, group.number, group.block_slots, forward, incident, drafted=group.draft
                )
                if damage is not None and group.entry_tokens > 1:
                    # An entry is that of its run's last token.
                    damage = damage._replace(offset=(damage.offset + 1) * group.entry_tokens - 1)
                self._outbox.add(damage)

    def reached(self, damages: Sequence[Reached], incident: str, step: int) -> None:
        """What was computed from damage, too, and who read it before a preemption."""
        for one in damages:
            violation = one.violation
            if self._groups[violation.group].draft or violation.reason is Reason.RECORD:
                continue  # requests compute what is right
            newest = self._forwards.number
            forward = newest - (step - violation.step)
            self._outbox.add(reached_damage(one, self._groups, forward, incident, newest))

    def note(self, output: Any, observer: Observer) -> None:
        """Follow what the scheduler has sent with an output, before the forward of that output."""
        message = getattr(output, HEALS_ATTRIBUTE, None)
        if message is None:
            return
        self._empty(message.abandoned, observer)
        # Once it follows the policy that the first rank brought, it takes the results of all.
        self._heard |= message.status.policy is self._outbox.policy
        if self._healed is not None:
            self._healed(message.heals if self._speaks else (), message.status)

    def _empty(self, abandoned: Sequence[tuple[int, int]], observer: Observer) -> None:
        """Empty the records of blocks that nobody holds: a table that leads to one of them is found.

        Its tokens may be those that the reader wants, with KV that was computed from damage.
        """
        for name, group in self._groups.items() if abandoned else ():
            blocks = [block for number, block in abandoned if number == group.number and block != NULL_BLOCK]
            if blocks and not group.states:
                slots = uploaded(slots_of(blocks, group.block_slots), self._device)
                give_up(observer, name, slots)

    def _around_results(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def results(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            due = self._outbox.due and self._heard
            return self._with_damage(result) if due and result is not None else result

        return results

    def _with_damage(self, result: Any) -> Any:
        from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

        if isinstance(result, ModelRunnerOutput):
            return _attached(result, self._outbox.empty())
        if isinstance(result, AsyncModelRunnerOutput):
            message, get_output = self._outbox.empty(), result.get_output
            result.get_output = lambda: _attached(get_output(), message)
        return result  # else of a pipeline's first stage: the next results will do


def _attached(output: Any, message: DamageMessage) -> Any:
    output = copy.copy(output)  # vLLM shares one empty output
    setattr(output, DAMAGE_ATTRIBUTE, message)
    return output
