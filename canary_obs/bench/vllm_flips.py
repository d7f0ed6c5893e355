"""Bits flipped in the KV tensors of a running vLLM, and how many of them the canary finds."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from canary_obs.demo.in_process_vllm import InProcessVllm
from canary_obs.engines.vllm.adapter import VllmAdapter
from canary_obs.records import Violation
from canary_obs.runtime.canary import CanaryRuntime
from canary_obs.vocabulary import Phase, Reason

Counts = dict[str, int]  # flips, caught, slot_named (where slots are known), other_violations
_DRAIN_SECONDS = 5.0
_PER_ROUND = 16  # fewer than the rows that the violation log keeps of one reason
_REQUESTS, _ANSWER_TOKENS = 4, 16
_INTEGERS = {2: torch.int16, 4: torch.int32}


def flip_everywhere(
    vllm: InProcessVllm, canary: CanaryRuntime, adapter: VllmAdapter, prompt: int, seed: int
) -> dict[str, Counts]:
    """Flip one bit in each part of every layer, in idle cached blocks, then in blocks in use; restore each.

    `prompt`: tokens of the prompts that fill the blocks. States are flipped where they are idle.
    """
    draw = random.Random(seed)
    found: list[Violation] = []
    report = canary.reporter.send_violations

    def report_and_keep(rows: list[Violation]) -> None:
        found.extend(rows)
        report(rows)

    canary.reporter.send_violations = report_and_keep  # type: ignore[method-assign, assignment]

    def flip(blocks: list[int]) -> Counts:
        places = [(layer, part) for layer in range(len(vllm.layer_caches())) for part in (0, 1)]
        step = min(_PER_ROUND, len(blocks))
        starts = range(0, len(places), step)
        return check([_choose_flips(vllm, places[start : start + step], blocks, draw) for start in starts])

    def check(rounds: list[list[_Flip]]) -> Counts:
        total: Counts = {}
        for flips in rounds:
            found.clear()
            with _flipped(flips), adapter.paused():
                canary.check_everything()
            for name, count in _count(flips, found).items():
                total[name] = total.get(name, 0) + count
        return total

    vllm.add_requests(vllm.random_prompts(_REQUESTS, prompt), 1)
    vllm.run()
    result = {"idle": flip(vllm.idle_blocks())}
    if vllm.layer_states():
        result["states"] = check(_state_flips(vllm, draw))
    vllm.add_requests(vllm.random_prompts(_REQUESTS, prompt), _ANSWER_TOKENS)
    steps = iter(range(_ANSWER_TOKENS // 2))
    vllm.run(lambda _: next(steps, None) is None)
    # Only whole blocks of the prompts: no step writes them any more.
    whole = prompt // vllm.layer_caches()[0].shape[2]
    lists = adapter.request_blocks(vllm.attention_group)
    result["in_use"] = flip([block for _, blocks in lists for block in blocks[:whole]])
    vllm.run()
    del canary.reporter.send_violations
    return result


def flip_hit(
    vllm: InProcessVllm, canary: CanaryRuntime, adapter: VllmAdapter, prefix: list[int], seed: int
) -> Counts:
    """Flip one bit in K and in V of every layer of a cached prefix, some at a time, and let a request hit it.

    Only what is reported at the hit counts: no sweep and no patrol is waited for.
    """
    draw = random.Random(seed)
    found: list[Violation] = []
    report = canary.reporter.send_violations
    vllm.core.reset_prefix_cache()
    vllm.add_requests([prefix], 1)
    vllm.run()

    def report_and_keep(rows: list[Violation]) -> None:
        found.extend(row for row in rows if row.phase is Phase.HIT)
        report(rows)

    canary.reporter.send_violations = report_and_keep  # type: ignore[method-assign, assignment]
    total: Counts = {}
    places = [(layer, part) for layer in range(len(vllm.layer_caches())) for part in (0, 1)]
    size = vllm.layer_caches()[0].shape[2]
    blocks = vllm.idle_blocks()
    step = min(_PER_ROUND, len(blocks))
    for start in range(0, len(places), step):
        flips = _choose_flips(vllm, places[start : start + step], blocks, draw)
        found.clear()
        with _flipped(flips):
            vllm.add_requests([prefix + vllm.random_prompts(1, size)[0]], 1)  # all of its blocks are hit
            vllm.run()
            vllm.synchronize()
            with adapter.paused():
                canary.delivery.drain(_DRAIN_SECONDS)
        for name, count in _count(flips, found).items():
            total[name] = total.get(name, 0) + count
    del canary.reporter.send_violations
    return total


def incomplete(results: dict[str, Counts]) -> dict[str, Counts]:
    """The results with a flip that was missed or whose slot was not named, or with another violation."""
    return {
        where: counts
        for where, counts in results.items()
        if counts["other_violations"]
        or {counts["caught"], counts.get("slot_named", counts["flips"])} != {counts["flips"]}
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Flip:
    """One bit of one of vLLM's KV tensors."""

    cache: torch.Tensor  # integers [blocks, heads, block size, K | V], or of states [blocks, ...]
    place: tuple[int, ...]  # index into it
    bit: int  # mask
    block_slots: int = 1  # 1 = a state

    @property
    def block(self) -> int:
        return self.place[0]

    @property
    def slot(self) -> int:
        return self.block if self.block_slots == 1 else self.block * self.block_slots + self.place[2]

    def toggle(self) -> None:
        with torch.inference_mode():
            self.cache[self.place] ^= self.bit


def _choose_flips(
    vllm: InProcessVllm, places: list[tuple[int, int]], blocks: list[int], draw: random.Random
) -> list[_Flip]:
    """One flip per (layer, 0 = K or 1 = V), each in a block of its own."""
    flips = []
    for (layer, part), block in zip(places, draw.sample(blocks, len(places)), strict=True):
        cache = vllm.layer_caches()[layer]
        _, heads, size, width = cache.shape
        element = part * width // 2 + draw.randrange(width // 2)
        place = block, draw.randrange(heads), draw.randrange(size), element
        integers = cache.view(_INTEGERS[cache.element_size()])
        bit = 1 << draw.randrange(14)
        flips.append(_Flip(cache=integers, place=place, bit=bit, block_slots=size))
    return flips


def _state_flips(vllm: InProcessVllm, draw: random.Random) -> list[list[_Flip]]:
    """One flip in each tensor of states, each in an idle block of its group; by group, and by rounds."""
    found: list[list[_Flip]] = []
    for group in sorted({number for number, _ in vllm.layer_states()}):
        states = [state for number, state in vllm.layer_states() if number == group]
        blocks = vllm.idle_blocks(group)
        step = min(_PER_ROUND, len(blocks))
        for start in range(0, len(states), step):
            part = states[start : start + step]
            chosen = zip(part, draw.sample(blocks, len(part)), strict=True)
            found.append([_state_flip(state, block, draw) for state, block in chosen])
    return found


def _state_flip(state: torch.Tensor, block: int, draw: random.Random) -> _Flip:
    place = block, *(draw.randrange(size) for size in state.shape[1:])
    integers = state.view(_INTEGERS[state.element_size()])
    return _Flip(cache=integers, place=place, bit=1 << draw.randrange(14))


def _count(flips: list[_Flip], found: list[Violation]) -> Counts:
    # The CPU's caches are tiled: there an element's place gives its block, not its slot.
    size, tiled = flips[0].block_slots, flips[0].cache.device.type == "cpu"
    hits = {row.slot for row in found if row.reason is Reason.KV_DATA}
    blocks, slots = {flip.block for flip in flips}, {flip.slot for flip in flips}
    counts = {"flips": len(flips), "caught": len(blocks & {slot // size for slot in hits})}
    if tiled:
        others = [row for row in found if row.slot // size not in blocks]
    else:
        counts["slot_named"] = len(slots & hits)
        others = [row for row in found if row.slot not in slots]
    return counts | {"other_violations": len(others)}


@contextmanager
def _flipped(flips: list[_Flip]) -> Iterator[None]:
    for flip in flips:
        flip.toggle()
    try:
        yield
    finally:
        for flip in flips:
            flip.toggle()
