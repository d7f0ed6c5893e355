"""Seeded traffic: shared prefixes, repeats, chunked prefills, aborts, and flushes between rounds."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any

from tests.engines.sglang.real.rig import Rig

VOCABULARY = 1000
SHARED = 300  # tokens


def prompts(count: int, seed: int = 0, longest: int = 120) -> dict[str, list[int]]:
    """Prompts that begin alike, of different lengths."""
    draw = random.Random(seed)
    base = [draw.randrange(4, VOCABULARY) for _ in range(SHARED)]
    return {
        f"r{seed}.{index}": base[: draw.randrange(8, longest)]
        + [draw.randrange(4, VOCABULARY) for _ in range(12)]
        for index in range(count)
    }


def storm(rig: Rig, rounds: int = 2, count: int = 20, seed: int = 3) -> Iterator[Iterable[Any]]:
    """A script for `Rig.run`: what comes in which turn depends on the seed alone."""
    from sglang.srt.managers.io_struct import AbortReq, FlushCacheReqInput

    draw = random.Random(seed)
    bases = [[draw.randrange(4, VOCABULARY) for _ in range(SHARED)] for _ in range(3)]
    earlier: list[list[int]] = []
    for turn in range(rounds):
        waiting, aborts = [], {}
        for index in range(count):
            if earlier and draw.random() < 0.25:
                prompt = list(draw.choice(earlier))
            else:
                begun = bases[index % 3][: draw.randrange(20, SHARED)] if draw.random() < 0.7 else []
                prompt = begun + [draw.randrange(4, VOCABULARY) for _ in range(draw.randrange(1, 120))]
            earlier.append(prompt)
            name = f"{turn}.{index}"
            waiting.append(rig.request(name, prompt, draw.randrange(1, 40)))
            if draw.random() < 0.15:
                aborts[name] = draw.randrange(1, 25)
        names = {request.rid for request in waiting}
        for _ in range(4000):
            if not waiting and names <= rig.finished:
                break
            yield _turn(rig, draw, waiting, aborts, AbortReq)
        assert names <= rig.finished, sorted(names - rig.finished)
        yield from [()] * 3
        if turn + 1 < rounds:
            yield [FlushCacheReqInput()]
            yield ()


def _turn(rig: Rig, draw: random.Random, waiting: list[Any], aborts: dict[str, int], abort: Any) -> list[Any]:
    """The requests of the next turn of the loop, and the aborts whose turn it is."""
    sent = list[Any]()
    while waiting and draw.random() < 0.3:
        sent.append(waiting.pop())
    unsent = {request.rid for request in waiting}
    for name in [name for name in aborts if name not in unsent]:
        aborts[name] -= 1
        if not aborts[name]:
            del aborts[name]
            sent.append(abort(rid=name))
            rig.finished.add(name)
    return sent
