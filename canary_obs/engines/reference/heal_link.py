"""From findings to the reference engine's scheduler and back, in one thread."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from canary_obs.engine_api.healing import Healed, Reached
from canary_obs.engine_api.observer import Observer
from canary_obs.engines.reference.groups import ReferenceGroup
from canary_obs.engines.reference.heal_actions import ReferenceActions
from canary_obs.engines.reference.heal_groups import Place, heal_groups
from canary_obs.engines.reference.heal_rehearsal import rehearse_healing
from canary_obs.engines.toolkit.block_slots import give_up, slots_of
from canary_obs.engines.toolkit.method_patches import MethodPatches
from canary_obs.engines.toolkit.reached_damage import reached_damage
from canary_obs.healing.damage import damage_of, in_order
from canary_obs.healing.guard_rail import Limits
from canary_obs.healing.healer import Healer
from canary_obs.healing.messages import DamageOutbox
from canary_obs.healing.plan import Block
from canary_obs.records import Violation
from canary_obs.reference_engine.engine import Engine
from canary_obs.vocabulary import HealPolicy, ObserverPart, Reason

_FORWARDS_KEPT = 4096


class ReferenceHealing:
    """HealingLink of one engine. Nothing is wrapped before a policy other than OFF is chosen.

    Acts before a forward's tokens are given out, before a step, and while the engine is idle.
    """

    def __init__(
        self, engine: Engine, groups: Mapping[str, ReferenceGroup], read_findings: Callable[[], None]
    ) -> None:
        """`read_findings`: has the observer's work of this step done now, if it was not yet."""
        self._engine, self._views, self._groups = engine, groups, heal_groups(engine, groups)
        self._read_findings = read_findings
        self._attached: tuple[MethodPatches, Observer] | None = None
        self._outbox = DamageOutbox()
        self._healed: Healed | None = None
        self._actions: ReferenceActions | None = None  # once a policy was chosen
        self._healer: Healer | None = None
        self._problem: str | None = None
        # Ends of the last forwards: how many the target and the draft model had made, and the target alone.
        self._ends: deque[tuple[int, int]] = deque(maxlen=_FORWARDS_KEPT)

    def attach(self, patches: MethodPatches, observer: Observer) -> None:
        """`patches` are restored at detach."""
        self._attached, self._actions, self._healer = (patches, observer), None, None

    def detach(self) -> None:
        """Leave nothing in quarantine."""
        self._attached = None
        if self._actions is not None:
            self._actions.release_all()

    def listen(self, healed: Healed) -> None:
        """Call `healed` with what was done."""
        self._healed = healed

    def choose(self, policy: HealPolicy, limits: Limits) -> None:
        """Followed from the next step on."""
        if policy is self._outbox.policy is HealPolicy.OFF:
            return
        self._outbox.choose(policy, limits)
        if self._healer is None and self._attached is not None:
            self._begin(limits, *self._attached)

    def release(self, blocks: Sequence[int] | None) -> None:
        """With the next step."""
        self._outbox.release(blocks)

    def damaged(self, found: Sequence[Violation], incident: str, step: int) -> None:
        """Put findings into the engine's terms."""
        for violation in found:
            group = self._groups[violation.group]
            if violation.redetection and group.place is Place.BUFFER and not self._is_used(violation):
                continue  # of a run that has ended: its slot is written before it is read again
            forward = self._forward(step - violation.step)
            damage = damage_of(
                violation, group.number, group.block_slots, forward, incident, drafted=group.draft
            )
            if damage is not None and group.place is Place.PAGE:  # an entry is that of its run's last token
                tokens = group.block_tokens // group.block_slots
                damage = damage._replace(offset=(damage.offset + 1) * tokens - 1)
            self._outbox.add(damage)

    def reached(self, damages: Sequence[Reached], incident: str, step: int) -> None:
        """What was computed from damage, too, and who read it before a preemption or a window's end."""
        for one in damages:
            violation = one.violation
            if self._groups[violation.group].draft or violation.reason is Reason.RECORD:
                continue  # requests compute what is right
            forward = self._forward(step - violation.step)
            self._outbox.add(reached_damage(one, self._groups, forward, incident))

    def _is_used(self, violation: Violation) -> bool:
        return bool(self._views[violation.group].holders(violation.slot))

    def _forward(self, ago: int) -> int:
        """The target's forward that was under way so many forwards, of both models, ago."""
        statistics = self._engine.statistics
        if self._engine.drafter is None:
            return statistics.forwards - ago
        total = statistics.forwards + statistics.draft_forwards - ago
        # A draft model's forwards after the target's belong to it.
        place = bisect_left(self._ends, (total, 0))
        return self._ends[place][1] if place < len(self._ends) else statistics.forwards

    def _begin(self, limits: Limits, patches: MethodPatches, observer: Observer) -> None:
        self._problem = rehearse_healing(self._engine)
        self._actions = ReferenceActions(self._engine, self._groups)
        self._actions.follow(patches)
        self._healer = Healer(self._actions, self._actions.lineage, limits)

        def around_commit(commit: Callable[[], None]) -> Callable[[], None]:
            def before_commit() -> None:
                self._read_findings()
                self._act(self._engine.statistics.forwards - 1, observer)
                commit()

            return before_commit

        def around_step(step: Callable[[], Any]) -> Callable[[], Any]:
            def healed_step() -> Any:
                self._act(self._engine.statistics.forwards, observer)
                return step()

            return healed_step

        def around_idle(idle: Callable[[], bool]) -> Callable[[], bool]:
            def healed_idle() -> bool:
                more = idle()
                self._act(self._engine.statistics.forwards, observer)
                return more

            return healed_idle

        patches.wrap(self._engine, "before_commit", around_commit)
        patches.wrap(self._engine, "step", around_step)
        patches.wrap(self._engine, "idle", around_idle)

    def _act(self, given_out: int, observer: Observer) -> None:
        """Do what waits; `given_out`: number of the last forward whose tokens were."""
        try:
            self._follow(given_out, observer)
        except Exception as error:  # noqa: BLE001 - a fault of the canary must not reach the engine
            observer.fault(ObserverPart.HEALING, error)

    def _follow(self, given_out: int, observer: Observer) -> None:
        actions, healer, statistics = self._actions, self._healer, self._engine.statistics
        if actions is None or healer is None:
            return
        actions.given_out = given_out
        for request in self._engine.scheduler.running:
            actions.since.setdefault(request.serial, statistics.forwards)
        if self._engine.drafter is not None:
            self._note_end(statistics.forwards, statistics.draft_forwards)
        if not self._outbox.due:
            return
        message = self._outbox.empty()
        healer.receive(message._replace(damages=()), self._problem)
        for damage in in_order(message.damages):
            actions.damage = damage
            healer.receive(message._replace(damages=(damage,), releases=None), self._problem)
        actions.damage = None
        report = healer.report()
        if report is None:
            return
        self._empty(report.abandoned, observer)
        if self._healed is not None:
            self._healed(report.heals, report.status)

    def _empty(self, abandoned: Sequence[Block], observer: Observer) -> None:
        """Empty the records of pages that nobody holds: a table that leads to one is found."""
        for name, group in self._groups.items() if abandoned else ():
            pages = [
                block for number, block in abandoned if (number, group.place) == (group.number, Place.PAGE)
            ]
            if pages:
                slots = slots_of(pages, group.block_slots)
                give_up(observer, name, slots.to(self._engine.config.device, non_blocking=True))

    def _note_end(self, forwards: int, drafted: int) -> None:
        if self._ends and self._ends[-1][1] == forwards:
            self._ends.pop()
        self._ends.append((forwards + drafted, forwards))
