"""What a dry run has said: what would have left or ended would not be there to be acted upon again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from canary_obs.healing.damage import Damage
from canary_obs.healing.plan import Block, CacheView, Plan, harmed
from canary_obs.vocabulary import HealAction

_REMEMBERED = 16_384  # things that were said, each once


class NewActions(NamedTuple):
    """Of a plan, what was not said before."""

    evict: int  # blocks
    recompute: tuple[str, ...]
    end: tuple[str, ...]
    quarantine: bool


_NOTHING = NewActions(0, (), (), False)


class DryRun:
    """Leaves damage in place, where it is found again: in its slot, in copies, by later requests."""

    def __init__(self, view: CacheView) -> None:
        self._view = view
        self._said: OrderedDict[tuple[object, ...], None] = OrderedDict()
        # By what would have left the cache: who was there then, and may have read it all the same.
        self._readers: OrderedDict[tuple[object, ...], frozenset[str]] = OrderedDict()

    def clear(self) -> None:
        """A policy was chosen: everything is said once more."""
        self._said.clear()
        self._readers.clear()

    def new(self, plan: Plan, damage: Damage, *, quarantine: bool) -> NewActions:
        """What a real run would still do about this damage after all that was said before."""
        if damage.request is not None:
            if not self._first(None, damage.request):
                return _NOTHING  # a request that had started again or ended would not have read it once more
        elif not self._first(damage.reason, damage.group, damage.slot) and damage.again:
            return _NOTHING  # all who had it then would have lost it
        content = tuple(self._view.keys_of((damage.group, damage.block)))
        if damage.request is None and self._is_copy(content, damage):
            return _NOTHING
        of = damage.group, damage.block, damage.request, content
        evict = self._leaving(plan, damage)
        readers = self._readers_of(of) if content else None
        recompute, end = (
            tuple(one for one in requests if (readers is None or one in readers) and self._acts(action, one))
            for action, requests in ((HealAction.RECOMPUTE, plan.recompute), (HealAction.END, plan.end))
        )
        return NewActions(evict, recompute, end, quarantine and self._first(HealAction.QUARANTINE, *of))

    def _acts(self, action: HealAction, request: str) -> bool:
        """Whether the request would still be there for it: one that had ended would not start again."""
        other = HealAction.END if action is HealAction.RECOMPUTE else HealAction.RECOMPUTE
        return (other, request) not in self._said and self._first(action, request)

    def _leaving(self, plan: Plan, damage: Damage) -> int:
        """How many blocks have content that would not have left in this incident before."""
        keys = {block: self._view.keys_of(block) for block in plan.evict}
        leaving = [block for block, own in keys.items() if not self._is_gone(own, damage)]
        for block in leaving:
            for key in keys[block]:
                self._gone(key, block, damage)
        cached = 0
        for held in self._view.requests():
            if not harmed(held, damage):
                continue
            size, block = held.block_tokens[damage.group], (damage.group, damage.block)
            place = held.blocks[damage.group].index(damage.block) * size + damage.offset
            page = place // self._view.key_tokens
            if (HealAction.RECOMPUTE, held.request) in self._said and size:
                # What an engine caches of it then leaves at once, if it was filled after the damage.
                filled = [
                    at for at, one in enumerate(held.blocks[damage.group]) if (block[0], one) in damage.filled
                ]
                first = filled[0] * size // self._view.key_tokens if filled else page
                new = [key for key in held.keys[first:page] if not any(self._view.blocks_of(key))]
                cached += sum(self._first(HealAction.EVICT, damage.incident, key) for key in new)
            for key in held.keys[page : page + 1]:  # nor would it be cached once its request ends
                self._gone(key, block, damage)
        return len(leaving) + cached

    def _gone(self, key: bytes, block: Block, damage: Damage) -> None:
        self._first(HealAction.EVICT, damage.incident, key)
        self._first(HealAction.EVICT, damage.incident, key, block)

    def _is_gone(self, keys: Iterable[bytes], damage: Damage) -> bool:
        return all((HealAction.EVICT, damage.incident, key) in self._said for key in keys)

    def _is_copy(self, content: tuple[bytes, ...], damage: Damage) -> bool:
        """Whether this came from a copy that would have left with a block: it would not have come back."""
        if not content or not self._is_gone(content, damage):
            return False
        block = damage.group, damage.block
        return not any((HealAction.EVICT, damage.incident, key, block) in self._said for key in content)

    def _readers_of(self, block: tuple[object, ...]) -> frozenset[str]:
        """Requests that were there when the block would have left the cache: later ones would not get it."""
        if block not in self._readers:
            self._readers[block] = frozenset(held.request for held in self._view.requests())
            if len(self._readers) > _REMEMBERED:
                self._readers.popitem(last=False)
        return self._readers[block]

    def _first(self, *what: object) -> bool:
        known = what in self._said
        self._said[what] = None
        self._said.move_to_end(what)
        if len(self._said) > _REMEMBERED:
            self._said.popitem(last=False)
        return not known
