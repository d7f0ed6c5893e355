"""Flipped bits in a slot's KV, restored once they have been detected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from canary_obs.engine_api.adapter import PrefixCache
from canary_obs.engine_api.views import StepView
from canary_obs.errors import UnsupportedEngine
from canary_obs.runtime.device.byte_address import ByteAddress, locate_byte
from canary_obs.runtime.perturb.injection import Injection, Outcome
from canary_obs.runtime.perturb.target import NO_PREFIX, Target
from canary_obs.vocabulary import Part, PerturbMode

_ATTEMPTS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _Flip:
    """A flipped bit, and how to recognise that the slot was not rewritten since."""

    address: ByteAddress
    mask: int
    corrupted: int  # value of the byte
    record: tuple[int, ...]  # of the slot


class Flips:
    """The three modes that flip a bit. Those that inject return why they could not; None = they did."""

    def __init__(self, target: Target, cache: PrefixCache) -> None:
        self._target, self._cache = target, cache
        self._flips: dict[int, _Flip] = {}  # by id of the injection

    def used(self, view: StepView, step: int) -> str | None:
        """In a slot that the forward is about to read; of a group of states, to write over."""
        target, prefixes = self._target, self._target.prefixes(view)
        if not prefixes:
            states = [slot for slot in view.groups[target.name].out_slots.tolist() if slot >= 0]
            if not any(map(target.is_complete, states)):
                return NO_PREFIX
            return self._flip(PerturbMode.REAL_KV_USED, step, lambda: target.random.choice(states))
        row, first, length = target.random.choice(prefixes)
        table = target.table(view)

        def choose() -> int:
            return target.slot_at(table, row, target.random.randrange(first, length))

        return self._flip(PerturbMode.REAL_KV_USED, step, choose)

    def written(self, view: StepView, step: int) -> str | None:
        """In a slot that the forward has written."""
        written = [slot for slot in view.groups[self._target.name].out_slots.tolist() if slot >= 0]
        if not written:
            return "the forward wrote no slot of the group"
        choose = self._target.random.choice
        return self._flip(PerturbMode.REAL_KV_POST_FORWARD, step, lambda: choose(written))

    def unused(self, step: int) -> str | None:
        """In a slot of the prefix cache that no request uses."""
        try:
            slots = self._cache.cached(self._target.name, unlocked_only=True).slots
        except UnsupportedEngine as error:
            return f"the prefix cache is unknown: {error}"
        if not slots.numel():
            return "the prefix cache has no slot that no request uses"
        pick = self._target.random.randrange
        return self._flip(PerturbMode.REAL_KV_UNUSED_CACHE, step, lambda: int(slots[pick(slots.numel())]))

    def restore(self, injection: Injection) -> None:
        """Undo a flip that was detected."""
        flip = self._flips.pop(id(injection), None)
        # A slot rewritten since then holds good bytes; flipping again would corrupt them.
        if (
            flip
            and self._target.record(injection.slot) == flip.record
            and flip.address.read() == flip.corrupted
        ):
            flip.address.flip(flip.mask)

    def expire(self, injection: Injection) -> None:
        """Close an injection whose slot was rewritten; every violation up to now is known."""
        flip = self._flips.get(id(injection))
        if flip is None or self._target.record(injection.slot) == flip.record:
            return
        del self._flips[id(injection)]
        close = self._target.injections.close
        if injection.mode is PerturbMode.REAL_KV_USED:
            close(injection, Outcome.MISSED, "read by a forward, then rewritten before any check")
        else:
            close(injection, Outcome.MASKED, "the slot was freed and rewritten unread")

    def _flip(self, mode: PerturbMode, step: int, choose: Callable[[], int]) -> str | None:
        target = self._target
        for _ in range(_ATTEMPTS):
            slot = choose()
            if target.has_bytes(slot) and target.is_complete(slot) and not target.holds(slot):
                break
        else:
            return f"{_ATTEMPTS} slots were tried: each has no fingerprint, or an injection already"
        sources = list(target.group.view.sources)
        if not sources:
            return "the group's bytes are not checked"
        source = target.random.choice(sources)
        byte, bit = target.random.randrange(source.slot_bytes), target.random.randrange(8)
        address = locate_byte(source, slot, byte)
        address.flip(1 << bit)
        part = Part.from_code(source.part)
        injection = target.injection(
            mode, slot, step, position=target.position(slot),
            detail=f"layer={source.layer}, part={part.value}, byte={byte}, bit={bit}",
        )  # fmt: skip
        self._flips[id(injection)] = _Flip(
            address=address, mask=1 << bit, corrupted=address.read(), record=target.record(slot)
        )
        return None
