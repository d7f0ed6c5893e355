"""What the loop that drives an engine sees of each step: its end, its tokens, the canary's host time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Any

import torch

Answer = dict[str, Any]  # of a load: JSON values
Clocks = Callable[[], Mapping[str, float]]  # the canary's seconds so far, by hook; empty without a canary


class StepLog:
    """Steps of one load. The canary keeps sums; read after each step they show what it added."""

    def __init__(self, clocks: Clocks) -> None:
        self._clocks = clocks
        self.steps: list[
            tuple[float, int, dict[str, float]]
        ] = []  # ended at (s), requests given a token, sums

    def note(self, outputs: list[Any]) -> None:
        """A step has ended and gave each of these requests a token."""
        self.steps.append((time.perf_counter(), len(outputs), dict(self._clocks())))

    def seconds(self) -> float:
        """From the end of the first step to that of the last one."""
        return self.steps[-1][0] - self.steps[0][0]

    def token_gaps_ms(self) -> list[float]:
        """Milliseconds from each step that gave a token to the next one: what a reader of answers waits."""
        ends = [ended for ended, given, _ in self.steps if given]
        return [round(1e3 * (after - before), 4) for before, after in pairwise(ends)]

    def host_us(self) -> dict[str, list[float]]:
        """By hook, and in `all`: microseconds of each step after the first."""
        return spent_us(sums for _, _, sums in self.steps)


def spent_us(sums: Iterable[Mapping[str, float]]) -> dict[str, list[float]]:
    """By hook, and in `all`: microseconds between readings of the clocks; empty without a canary."""
    read = list(sums)
    hooks = sorted({hook for reading in read for hook in reading})
    # A clock that is missing from a reading had not begun.
    spent = {
        hook: [1e6 * (after.get(hook, 0.0) - before.get(hook, 0.0)) for before, after in pairwise(read)]
        for hook in hooks
    }
    if spent:
        spent["all"] = [sum(step) for step in zip(*spent.values(), strict=True)]
    return {hook: [round(value, 1) for value in values] for hook, values in spent.items()}


def with_pinned(run: Callable[[], Answer]) -> Answer:
    """Its answer; on a GPU with `pinned`: `allocations` of pinned memory meanwhile, and their `us`."""
    if not torch.cuda.is_available():
        return run()
    before = torch.cuda.host_memory_stats()
    answer, now = run(), torch.cuda.host_memory_stats()
    names = {"allocations": "num_host_alloc", "us": "host_alloc_time.total"}
    answer["pinned"] = {name: now[key] - before[key] for name, key in names.items()}
    return answer
