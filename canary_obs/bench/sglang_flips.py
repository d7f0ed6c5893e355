"""Bits flipped in the KV buffers of a running SGLang scheduler, and how many of them its canary finds."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch

from canary_obs.engines.sglang.scheduler_canary import SchedulerCanary
from canary_obs.records import Violation
from canary_obs.vocabulary import Reason

_PER_ROUND = 16  # fewer than the rows that the violation log keeps of one reason
_DRAIN_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Flip:
    """One bit of a slot."""

    content: torch.Tensor  # uint8 [slots, bytes]
    slot: int
    byte: int
    mask: int

    def toggle(self) -> None:
        with torch.inference_mode():
            self.content[self.slot, self.byte] ^= self.mask


def flip_everywhere(scheduler: Any, given: SchedulerCanary, seed: int) -> dict[str, Any]:
    """Flip one bit in each part of every layer, in a cached slot of its own; restore each.

    Returns the flips, those of them whose slot was named, and other violations.
    """
    canary, adapter = given.runtime, given.adapter
    assert canary is not None, "this scheduler is not protected"
    assert adapter is not None
    draw, found = random.Random(seed), list[Violation]()
    report = canary.reporter.send_violations

    def report_and_keep(rows: list[Violation]) -> None:
        found.extend(rows)
        report(rows)

    canary.reporter.send_violations = report_and_keep  # type: ignore[method-assign, assignment]
    counts = {"flips": 0, "slot_named": 0, "other_violations": 0}
    rounds = []
    for group, buffers in _buffers(scheduler.tp_worker.model_runner.token_to_kv_pool).items():
        cached = adapter.prefix_cache.cached(group, unlocked_only=True).slots.tolist()
        if not cached:
            raise LookupError(f"no slot of {group} is cached; run a load first, which leaves some")
        starts = range(0, len(buffers), min(_PER_ROUND, len(cached)))
        rounds += [(group, _choose(buffers[start : start + starts.step], cached, draw)) for start in starts]
    for group, flips in rounds:
        found.clear()
        for flip in flips:
            flip.toggle()
        try:
            canary.check_everything()
            canary.delivery.drain(_DRAIN_SECONDS)
        finally:
            for flip in flips:
                flip.toggle()
        named = {row.slot for row in found if row.reason is Reason.KV_DATA and row.group == group}
        slots = {flip.slot for flip in flips}
        counts["flips"] += len(flips)
        counts["slot_named"] += len(named & slots)
        counts["other_violations"] += sum(row.group != group or row.slot not in slots for row in found)
    del canary.reporter.send_violations
    return counts


def _buffers(pool: Any) -> dict[str, list[torch.Tensor]]:
    """Of each group, a tensor for each part of a layer, [slots, ...]."""
    full = getattr(pool, "full_kv_pool", pool)
    found = {"full": [buffer for pair in zip(full.k_buffer, full.v_buffer, strict=True) for buffer in pair]}
    if hasattr(pool, "mamba_pool"):
        held = pool.mamba_pool.mamba_cache
        found["state"] = [layer for part in (*held.conv, held.temporal) for layer in part]
    return found


def _choose(buffers: list[torch.Tensor], slots: list[int], draw: random.Random) -> list[_Flip]:
    flips = []
    for buffer, slot in zip(buffers, draw.sample(slots, len(buffers)), strict=True):
        content = buffer.view(torch.uint8).view(buffer.shape[0], -1)
        byte, mask = draw.randrange(content.shape[1]), 1 << draw.randrange(8)
        flips.append(_Flip(content=content, slot=slot, byte=byte, mask=mask))
    return flips
