"""The rank's part in healing: hands over what was found, and reports what the engine's scheduler did."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from canary_obs.config import CanaryConfig
from canary_obs.engine_api.adapter import EngineAdapter
from canary_obs.engine_api.healing import FollowsReaders, Reached
from canary_obs.engine_api.requests import BlockTable
from canary_obs.errors import RepairRefused
from canary_obs.healing.guard_rail import GuardRail, Limits
from canary_obs.heals import Heal, HealStatus
from canary_obs.records import Violation
from canary_obs.runtime.device.state import Group
from canary_obs.runtime.health import Health
from canary_obs.runtime.put_back import PutBack
from canary_obs.runtime.repair import check_group, repair_block
from canary_obs.vocabulary import HealAction, HealOutcome, HealPolicy, Phase, Reason, State

log = logging.getLogger("canary_obs")
_IMPOSSIBLE = "damage in this engine cannot be healed: its adapter has no way to its scheduler"
_WAITING = "the scheduler has not answered: it does with the engine's next step"


class Healing:
    """Off, it costs nothing: it is called for findings only."""

    def __init__(
        self,
        adapter: EngineAdapter,
        config: CanaryConfig,
        send: Callable[[Sequence[Heal]], None],
        health: Health,
        slots: Mapping[str, Group],
    ) -> None:
        """`send` reports actions to the service. `slots`: memory and records, by group."""
        self._limits = Limits(config.heal_actions_per_minute, config.heal_pool_share)
        self._guard = GuardRail(self._limits)  # of repairs
        self._adapter, self._wanted, self._send = adapter, config.heal, send
        self._slots = slots
        self._refused: set[str] = set()  # groups of which nothing can be repaired, each said once
        self._put_back = PutBack()
        health.add_source(self)
        self.policy = HealPolicy.OFF
        self._status: HealStatus | None = None  # the scheduler's, of this policy
        self._counts: Counter[tuple[HealAction, HealOutcome]] = Counter()

    @property
    def active(self) -> bool:
        """Whether findings are worth more the sooner they are read."""
        return self.policy is not HealPolicy.OFF

    @property
    def status(self) -> HealStatus:
        """What may be done now, as far as it is known here."""
        if self.policy is HealPolicy.OFF:
            kept = () if self._status is None else self._status.quarantined
            blocks = 0 if self._status is None else self._status.pool_blocks
            return HealStatus(policy=self.policy, effective=self.policy, quarantined=kept, pool_blocks=blocks)
        if self._status is not None and self._status.policy is self.policy:
            return self._status
        why = _WAITING if self._adapter.healing is not None else _IMPOSSIBLE
        effective = HealPolicy.OFF if self._adapter.healing is None else HealPolicy.DRY_RUN
        return HealStatus(policy=self.policy, effective=effective, why=why)

    @property
    def counts(self) -> dict[HealAction, dict[HealOutcome, int]]:
        """Actions since attach."""
        return {
            action: {outcome: self._counts[action, outcome] for outcome in HealOutcome}
            for action in HealAction
        }

    def reasons(self) -> list[tuple[State, str]]:
        """Degraded while less is done than was asked for."""
        status = self._status
        if status is not None and status.why is not None and status.policy is self.policy:
            return [(State.DEGRADED, f"healing is a dry run, not {status.policy.value}: {status.why}")]
        if self.policy is HealPolicy.REPAIR and self._guard.closed is not None:
            return [(State.DEGRADED, f"damage is not put back any more: {self._guard.closed}")]
        return []

    def start(self) -> None:
        """Follow the policy of the settings; after attach."""
        if self._wanted is not HealPolicy.OFF:
            self.choose(self._wanted)

    def choose(self, policy: HealPolicy) -> None:
        """Follow this policy from now on. OFF ends healing at once: nothing is handed over any more."""
        if policy is not self.policy:
            log.warning("canary_obs: healing policy is %s, it was %s", policy.value, self.policy.value)
        self.policy = policy
        self._guard.reopen(self._limits)
        self._refused.clear()
        if (link := self._adapter.healing) is not None:
            link.listen(self._healed)
            link.choose(policy, self._limits)

    def release(self, blocks: Sequence[int] | None) -> None:
        """Bring quarantined blocks back; None = all."""
        if (link := self._adapter.healing) is not None:
            link.release(blocks)

    def repair(
        self, found: Sequence[Violation], readers_known: Callable[[str, int], bool], incident: str
    ) -> list[Violation]:
        """Put back what can be; returns the findings of which more is left than those who have read it.

        `readers_known`: called with the group and first damaged slot of each block that was put back.
        """
        if self.status.effective is not HealPolicy.REPAIR:
            return list(found)
        tables, repaired = self._adapter.block_tables() or {}, set[int]()
        for (group, block), rows in _by_block(found, tables).items():
            late = [row for row in rows if self._put_back.is_earlier(group, block, row)]
            known = set(map(id, late))  # a log may hold thousands of rows: none is compared with others
            fresh = [row for row in rows if not row.redetection and id(row) not in known]
            if fresh and group not in self._refused:
                gone = rows if self._repair(fresh[0], tables.get(group), incident) else []
            else:
                gone = late
            new = next((row for row in gone if not row.redetection), None)
            # Without a good account of who has read, everything is done that `protect` does.
            if gone and (new is None or readers_known(group, new.slot)):
                repaired.update(map(id, gone))
                if fresh:
                    self._put_back.note(self._slots[group], block)
        return [row for row in found if id(row) not in repaired]

    def put_back_before(self, found: Sequence[Violation]) -> set[int]:
        """Places of redetections of damage that was put back after their check: who read it is listed."""
        if self.policy is not HealPolicy.REPAIR:
            return set()
        tables = self._adapter.block_tables() or {}
        return {
            place
            for place, row in enumerate(found)
            if row.redetection
            and _is_read_of_bytes(row)
            and self._put_back.is_earlier(*_block_of(row, tables), row)
        }

    def _repair(self, violation: Violation, table: BlockTable | None, incident: str) -> bool:
        group, outcome, block = self._slots[violation.group], HealOutcome.DONE, None
        try:
            slots = self._slots_of(group, violation.slot, table)
            block = slots.start // len(slots) if len(slots) > 1 else None
            if self._guard.admits(1, 0, self.status.pool_blocks):
                detail = repair_block(group, slots)
            else:
                outcome, detail = HealOutcome.LIMITED, str(self._guard.closed)
        except RepairRefused as refused:
            outcome, detail = HealOutcome.REFUSED, str(refused)
        heal = Heal(
            action=HealAction.REPAIR, outcome=outcome, policy=self.policy, group=violation.group, block=block,
            time_ns=time.time_ns(), reason=violation.reason, incident=incident or None, detail=detail,
        )  # fmt: skip
        self._healed((heal,), self.status)
        return outcome is HealOutcome.DONE

    def _slots_of(self, group: Group, slot: int, table: BlockTable | None) -> range:
        """The block that the slot is of. Raises RepairRefused where nothing of the group can be put back."""
        try:
            check_group(group)
            if table is None:
                raise RepairRefused("the engine does not show which requests hold the blocks of this group")
        except RepairRefused:
            self._refused.add(group.name)
            raise
        start = slot // table.block_slots * table.block_slots
        return range(start, start + table.block_slots)

    def found(
        self, violations: Sequence[Violation], reached: Sequence[Reached], incident: str, step: int
    ) -> None:
        """Hand over what was read in forward `step`, and whom it has reached."""
        link = self._adapter.healing
        if self.policy is HealPolicy.OFF or link is None:
            return
        if violations:
            link.damaged(violations, incident, step)
        if reached and isinstance(link, FollowsReaders):
            link.reached(reached, incident, step)

    def _healed(self, heals: Sequence[Heal], status: HealStatus) -> None:
        before, self._status = self._status, status
        if status.why is not None and (before is None or before.why != status.why):
            log.error(
                "canary_obs: healing makes a dry run, %s was asked for: %s", status.policy.value, status.why
            )
        for heal in heals:
            self._counts[heal.action, heal.outcome] += 1
            log.warning("canary_obs: healing: %s", _text(heal))
        if heals:
            self._send(heals)


def _by_block(
    found: Sequence[Violation], tables: Mapping[str, BlockTable]
) -> dict[tuple[str, int], list[Violation]]:
    blocks: dict[tuple[str, int], list[Violation]] = {}
    for row in filter(_is_read_of_bytes, found):
        blocks.setdefault(_block_of(row, tables), []).append(row)
    return blocks


def _is_read_of_bytes(row: Violation) -> bool:
    """Not one of bytes that are written over next."""
    return row.reason is Reason.KV_DATA and row.phase is not Phase.HEAD


def _block_of(row: Violation, tables: Mapping[str, BlockTable]) -> tuple[str, int]:
    size = tables[row.group].block_slots if row.group in tables else 1
    return row.group, row.slot // size


def _text(heal: Heal) -> str:
    facts = {
        "action": heal.action.value, "outcome": heal.outcome.value, "policy": heal.policy.value,
        "group": heal.group or None, "block": heal.block, "request": heal.request,
        "blocks": heal.blocks or None, "tokens": heal.tokens or None, "forwards": heal.forwards,
        "reason": heal.reason, "incident": heal.incident, "detail": heal.detail,
    }  # fmt: skip
    return ", ".join(f"{name}={value}" for name, value in facts.items() if value is not None)
