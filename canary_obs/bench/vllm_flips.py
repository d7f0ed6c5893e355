"""Bits flipped in the KV tensors of a running vLLM: what the canary says of each."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from canary_obs.bench.vllm_host import VllmHost
from canary_obs.records import Violation
from canary_obs.runtime.canary import CanaryRuntime
from canary_obs.vocabulary import Reason

if TYPE_CHECKING:
    from canary_obs.engines.vllm.adapter import VllmAdapter

_PER_ROUND = 16  # fewer than the rows that the violation log keeps of a kind
_REQUESTS, _ANSWER = 4, 16
_INTEGERS = {2: torch.int16, 4: torch.int32}


def flip_everywhere(
    host: VllmHost, canary: CanaryRuntime, adapter: VllmAdapter, prompt: int, seed: int
) -> dict[str, Any]:
    """One bit in K and in V of every layer, of idle cached blocks and of blocks in use, put back after."""
    draw = random.Random(seed)
    found: list[Violation] = []
    keep = canary.reporter.violations

    def listen(rows: list[Violation]) -> None:
        found.extend(rows)
        keep(rows)

    canary.reporter.violations = listen  # type: ignore[method-assign, assignment]
    host.ask(host.prompts(_REQUESTS, prompt), 1)
    host.run()

    def flip(blocks: list[int]) -> dict[str, int]:
        total: dict[str, int] = {}
        places = [(layer, half) for layer in range(len(host.layer_caches())) for half in (0, 1)]
        for start in range(0, len(places), _PER_ROUND):
            planted = _plant(host, places[start : start + _PER_ROUND], blocks, draw)
            found.clear()
            with _flipped(planted), adapter.at_rest():
                canary.check_everything()
            for key, count in _told(planted, found).items():
                total[key] = total.get(key, 0) + count
        return total

    idle = flip(host.idle_blocks())
    host.ask(host.prompts(_REQUESTS, prompt), _ANSWER)
    steps = iter(range(_ANSWER // 2))
    host.run(lambda _: next(steps, None) is None)
    # Blocks of the prompts: no step writes them any more.
    whole = prompt // host.layer_caches()[0].shape[2]
    used = [block for _, blocks in adapter.request_blocks(0) for block in blocks[:whole]]
    result = {"idle": idle, "in_use": flip(used)}
    host.run()
    del canary.reporter.violations
    return result


def not_found(told: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    """Of what `flip_everywhere` tells: where a flip was missed, not named, or something else reported."""
    return {
        where: counts
        for where, counts in told.items()
        if counts["other_violations"]
        or {counts["caught"], counts.get("slot_named", counts["flips"])} != {counts["flips"]}
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Flip:
    """One bit of vLLM's own tensor."""

    cache: torch.Tensor  # integers [blocks, heads, block size, K | V]
    place: tuple[int, ...]
    bit: int

    @property
    def block(self) -> int:
        return self.place[0]

    @property
    def slot(self) -> int:
        return self.place[0] * self.cache.shape[2] + self.place[2]

    def turn(self) -> None:
        with torch.inference_mode():
            self.cache[self.place] ^= self.bit


def _plant(
    host: VllmHost, places: list[tuple[int, int]], blocks: list[int], draw: random.Random
) -> list[_Flip]:
    """One flip per (layer, 0 = K or 1 = V), each in a block of its own."""
    planted = []
    for (layer, half), block in zip(places, draw.sample(blocks, len(places)), strict=True):
        cache = host.layer_caches()[layer]
        _, heads, size, width = cache.shape
        element = half * width // 2 + draw.randrange(width // 2)
        place = block, draw.randrange(heads), draw.randrange(size), element
        integers = cache.view(_INTEGERS[cache.element_size()])
        planted.append(_Flip(cache=integers, place=place, bit=1 << draw.randrange(14)))
    return planted


def _told(planted: list[_Flip], found: list[Violation]) -> dict[str, int]:
    """The CPU's caches are tiled: an element's place tells its block there, not its slot."""
    size, tiled = planted[0].cache.shape[2], planted[0].cache.device.type == "cpu"
    hits = {row.slot for row in found if row.reason is Reason.KV_DATA}
    blocks, slots = {flip.block for flip in planted}, {flip.slot for flip in planted}
    told = {"flips": len(planted), "caught": len(blocks & {slot // size for slot in hits})}
    if tiled:
        others = [row for row in found if row.slot // size not in blocks]
    else:
        told["slot_named"] = len(slots & hits)
        others = [row for row in found if row.slot not in slots]
    return told | {"other_violations": len(others)}


@contextmanager
def _flipped(planted: list[_Flip]) -> Iterator[None]:
    for flip in planted:
        flip.turn()
    try:
        yield
    finally:
        for flip in planted:
            flip.turn()
