"""Carries out what is decided about damage, within limits, and keeps an account of every action."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Set as AbstractSet
from functools import partial
from itertools import repeat

from canary_obs.errors import QuarantineRefused
from canary_obs.healing.actor import Actor
from canary_obs.healing.damage import Damage, in_order
from canary_obs.healing.dry_run import DryRun
from canary_obs.healing.guard_rail import GuardRail, Limits
from canary_obs.healing.lineage import Lineage
from canary_obs.healing.messages import DamageMessage, HealsMessage
from canary_obs.healing.plan import Block, Plan, harmed, make_plan
from canary_obs.healing.quarantine import RepeatedDamage
from canary_obs.heals import Heal, HealStatus
from canary_obs.vocabulary import HealAction, HealOutcome, HealPolicy

log = logging.getLogger("canary_obs")


class Healer:
    """Heals one engine's KV cache; on the thread that runs its scheduler."""

    def __init__(
        self,
        actor: Actor,
        lineage: Lineage,
        limits: Limits,
        clock: Callable[[], float] = time.monotonic,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._actor, self._lineage, self._wall_ns = actor, lineage, wall_ns
        self._guard = GuardRail(limits, clock)
        self._share = limits.pool_share
        self._repeated = RepeatedDamage(clock)
        self._generations: dict[Block, int] = {}  # how often healing has set a block free
        self._dry_run = DryRun(actor)
        self._problem: str | None = None  # why nothing may be done on this engine
        self.policy = HealPolicy.OFF  # as asked for
        self.quarantined: dict[Block, str] = {}  # by block: the group's name
        self.heals: list[Heal] = []  # since they were reported last
        self._abandoned: dict[
            Block, None
        ] = {}  # likewise: blocks that nobody may read before they are written
        self._chosen, self._status_due = -1, False

    @property
    def why(self) -> str | None:
        """Why a dry run is all that is made, although more was asked for."""
        return (
            None
            if self.policy in (HealPolicy.OFF, HealPolicy.DRY_RUN)
            else self._problem or self._guard.closed
        )

    @property
    def effective(self) -> HealPolicy:
        """The policy that is followed."""
        return self.policy if self.why is None else HealPolicy.DRY_RUN

    def status(self) -> HealStatus:
        """What an operator is shown."""
        return HealStatus(
            policy=self.policy, effective=self.effective, why=self.why,
            pool_blocks=self._actor.pool_blocks,
            quarantined=tuple((name, block) for (_, block), name in sorted(self.quarantined.items())),
        )  # fmt: skip

    def choose(self, policy: HealPolicy, problem: str | None = None, limits: Limits | None = None) -> None:
        """Follow this policy from now on. `problem`: why the engine allows no more than a dry run.

        `limits`: others than before.
        """
        self.policy, self._problem = policy, problem
        self._guard.reopen(limits)
        self._share = self._share if limits is None else limits.pool_share
        self._dry_run.clear()

    def heal(self, damages: Iterable[Damage]) -> None:
        """Do what the policy says about each of these; never raises."""
        for damage in in_order(damages):
            if self.effective is HealPolicy.OFF:
                return
            try:
                self._heal(damage)
            except Exception as error:  # noqa: BLE001 - the engine must go on
                self._give_up(error)

    def receive(self, message: DamageMessage, problem: str | None = None) -> None:
        """Do what a rank asks for; `problem` as for `choose`."""
        if message.chosen != self._chosen:
            self._chosen, self._status_due = message.chosen, True
            self.choose(message.policy, problem, message.limits)
        if message.releases is not None:
            self._status_due = True
            self.release(message.releases or None)
        before = self.why
        self.heal(message.damages)
        self._status_due |= before != self.why

    def report(self) -> HealsMessage | None:
        """What was done, and what may be done, since the last report; None = nothing new."""
        if not self.heals and not self._status_due:
            return None
        self._status_due = False
        abandoned, self._abandoned = tuple(self._abandoned), {}
        return HealsMessage(self.drain(), self.status(), abandoned)

    def drain(self) -> tuple[Heal, ...]:
        """What was done since the last call."""
        heals, self.heals = tuple(self.heals), []
        return heals

    def release(self, blocks: Iterable[int] | None = None) -> None:
        """Bring quarantined blocks back, by number; None = all."""
        wanted = None if blocks is None else set(blocks)
        for (group, number), name in list(self.quarantined.items()):
            if wanted is None or number in wanted:
                block, outcome, detail = (group, number), HealOutcome.DONE, None
                try:
                    self._actor.release(block)
                except Exception as error:  # noqa: BLE001 - the engine must go on
                    outcome, detail = HealOutcome.FAILED, _text(error)
                else:
                    del self.quarantined[block]
                    self._repeated.forget(group, number)
                self._note(HealAction.RELEASE, outcome, None, group=name, block=number, detail=detail)

    # One damage ------------------------------------------------------------------------------------

    def _heal(self, damage: Damage) -> None:
        in_use = self._in_use(damage)
        plan = make_plan(damage, self._actor, self._lineage, self.effective)
        quarantine = in_use and self._is_repeated(damage)
        if plan.actions or quarantine or plan.left:
            self._follow(plan, damage, quarantine=quarantine)

    def _follow(self, plan: Plan, damage: Damage, *, quarantine: bool) -> None:
        pool = self._actor.pool_blocks
        if self.effective is HealPolicy.DRY_RUN:
            self._say(plan, damage, HealOutcome.WOULD, quarantine=quarantine)
            return
        if not self._guard.admits(plan.actions + quarantine, len(plan.evict) + quarantine, pool):
            log.error("canary_obs: healing is a dry run from now on: %s", self.why)
            self._say(plan, damage, HealOutcome.LIMITED, quarantine=quarantine)
            return
        touched = {*plan.evict, *self._blocks_of({*plan.recompute, *plan.end})}
        for request in plan.left:
            self._actor.bar(request)
        if plan.evict:
            self._act(HealAction.EVICT, damage, lambda: self._actor.evict(plan.evict), self._evicted(plan))
        for request in plan.recompute:
            self._recompute(request, damage)
        for request in plan.end:
            self._act(HealAction.END, damage, partial(self._actor.end, request), request=request)
        if quarantine:
            self._quarantine(damage)
        block = damage.group, damage.block
        if damage.request is None and not self._in_use(damage):
            self._generations[block] = self._generations.get(block, 0) + 1
        self._abandoned.update(dict.fromkeys(self._free(touched)))

    def _blocks_of(self, requests: AbstractSet[str]) -> Iterator[Block]:
        for held in self._actor.requests():
            if held.request in requests:
                for group, blocks in enumerate(held.blocks):
                    yield from zip(repeat(group), blocks)

    def _free(self, blocks: Iterable[Block]) -> Iterator[Block]:
        """Those of these blocks that are neither cached nor held."""
        left: dict[int, set[int]] = defaultdict(set)
        for group, block in blocks:
            left[group].add(block)
        for held in self._actor.requests():
            for group, others in enumerate(held.blocks):
                if group in left:
                    left[group].difference_update(others)  # a pool may have a hundred thousand
        for group, free in left.items():
            yield from (one for one in zip(repeat(group), free) if not self._actor.keys_of(one))

    def _recompute(self, request: str, damage: Damage) -> None:
        try:
            tokens = self._actor.recompute(request)
        except Exception as error:
            self._note(HealAction.RECOMPUTE, HealOutcome.FAILED, damage, request=request, detail=_text(error))
            raise
        self._note(HealAction.RECOMPUTE, HealOutcome.DONE, damage, request=request, tokens=tokens)

    def _act(
        self, action: HealAction, damage: Damage, act: Callable[[], None],
        more: tuple[HealOutcome, int, str | None] = (HealOutcome.DONE, 0, None), request: str | None = None,
    ) -> None:  # fmt: skip
        outcome, blocks, detail = more
        try:
            act()
        except Exception as error:
            self._note(action, HealOutcome.FAILED, damage, request=request, detail=_text(error))
            raise
        self._note(action, outcome, damage, request=request, blocks=blocks, detail=detail)

    def _evicted(self, plan: Plan) -> tuple[HealOutcome, int, str | None]:
        details = []
        if (elsewhere := self._actor.copies_elsewhere) is not None:
            details.append(f"copies may be left in {elsewhere}")
        if plan.partly_known:
            details.append("blocks that were cached before healing began may have been computed from it")
        outcome = HealOutcome.UNVERIFIED if details else HealOutcome.DONE
        return outcome, len(plan.evict), "; ".join(details) or None

    def _say(self, plan: Plan, damage: Damage, outcome: HealOutcome, *, quarantine: bool) -> None:
        """Note what is not done, each once."""
        new = self._dry_run.new(plan, damage, quarantine=quarantine)
        if new.evict:
            self._note(HealAction.EVICT, outcome, damage, blocks=new.evict)
        for action, requests in ((HealAction.RECOMPUTE, new.recompute), (HealAction.END, new.end)):
            for request in requests:
                self._note(action, outcome, damage, request=request)
        if new.quarantine:
            self._note(HealAction.QUARANTINE, outcome, damage)

    # Quarantine ------------------------------------------------------------------------------------

    def _is_repeated(self, damage: Damage) -> bool:
        block = damage.group, damage.block
        if damage.again or damage.request is not None or damage.kv_intact or block in self.quarantined:
            return False
        if damage.overwritten:
            return False  # it is not known which content was damaged
        return self._repeated.again(damage.group, damage.block, damage.slot, self._generations.get(block, 0))

    def _quarantine(self, damage: Damage) -> None:
        """Hold the block back; where the pool would be too small without it, say so and go on."""
        block, pool = (damage.group, damage.block), self._actor.pool_blocks
        try:
            if len(self.quarantined) + 1 > self._share * pool:
                raise QuarantineRefused(
                    f"{len(self.quarantined)} of {pool} blocks are in quarantine, the limit is "
                    f"{self._share:.0%} (heal_pool_share)"
                )
            self._actor.quarantine(block)
        except QuarantineRefused as refused:
            self._note(HealAction.QUARANTINE, HealOutcome.LIMITED, damage, detail=str(refused))
        except Exception as error:
            self._note(HealAction.QUARANTINE, HealOutcome.FAILED, damage, detail=_text(error))
            raise
        else:
            self.quarantined[block] = damage.group_name
            self._note(HealAction.QUARANTINE, HealOutcome.DONE, damage)

    def _in_use(self, damage: Damage) -> bool:
        """Whether what was damaged is still there for someone to read."""
        if self._actor.keys_of((damage.group, damage.block)):
            return True
        return any(harmed(held, damage) for held in self._actor.requests())

    # Account ---------------------------------------------------------------------------------------

    def _give_up(self, error: Exception) -> None:
        # What an engine's function did before it raised is unknown: an operator has to ask for more.
        self._problem = f"an action failed ({_text(error)})"
        log.error("canary_obs: healing is a dry run from now on: %s", self._problem, exc_info=error)

    def _note(
        self, action: HealAction, outcome: HealOutcome, damage: Damage | None, *, request: str | None = None,
        blocks: int = 0, tokens: int = 0, detail: str | None = None, group: str = "",
        block: int | None = None,
    ) -> None:  # fmt: skip
        if damage is not None:
            group, block = damage.group_name, damage.block
        self.heals.append(
            Heal(
                action=action,
                outcome=outcome,
                policy=self.policy,
                group=group,
                block=block,
                request=request,
                blocks=blocks,
                tokens=tokens,
                detail=detail,
                time_ns=self._wall_ns(),
                reason=None if damage is None else damage.reason,
                incident=None if damage is None else damage.incident or None,
                forwards=None if damage is None else max(0, self._actor.given_out + 1 - damage.found),
            )
        )


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
