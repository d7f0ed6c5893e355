"""Where the time of a request goes: on the engine's thread by part, and of a load from leg to leg."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

LEGS = (
    "until its copy is submitted", "vLLM submits it", "until it is reported", "until its forward is launched",
    "until the first token", "until the device is idle",
)  # fmt: skip


class Served(NamedTuple):
    """One request."""

    seconds: float  # to its first token, and until the device is idle
    parts: Mapping[tuple[int, str], float]  # seconds on the engine's thread, by number of the leg and part
    legs: Sequence[float]  # seconds of each of LEGS; empty = it loaded nothing, or in several jobs


class Clock:
    """Wall time of the methods that it wraps; what a wrapped method inside takes is not its own."""

    def __init__(self) -> None:
        self.seconds: Counter[tuple[int, str]] = Counter()  # by number of the leg and part
        self.marks: Sequence[float] = ()  # as `Copies` has them: as many legs have ended
        self._inner = [0.0]

    def wrap(self, owner: Any, name: str, part: str) -> None:
        """Count the time of this method to a part."""
        original = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            leg, started = len(self.marks), time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                spent = time.perf_counter() - started
                self.seconds[leg, part] += spent - self._inner.pop()
                self._inner[-1] += spent

        setattr(owner, name, timed)


class Copies:
    """The jobs of an offload worker: when loads are submitted and reported, and what vLLM's events say."""

    def __init__(self, worker: Any, model: Any) -> None:
        """`model`: the last of a forward is launched before its `compute_logits` is called."""
        self.ended: list[tuple[str, float]] = []  # of each job: path, seconds by vLLM's events
        self.marks: list[float] = []  # of loads: asked for, submitted, reported; its forward launched
        self._paths: dict[int, str] = {}
        self._logits, model.compute_logits = model.compute_logits, self._compute_logits
        self._finished = worker.get_finished
        worker.get_finished = self._get_finished
        worker.submit_store = partial(self._submit, "store", worker.submit_store)
        worker.submit_load = partial(self._submit, "load", worker.submit_load)

    def _get_finished(self) -> Any:
        results = self._finished()
        paths = [self._paths.pop(each.job_id) for each in results]
        self.ended += zip(paths, [each.transfer_time or 0.0 for each in results], strict=True)
        self.marks += [time.perf_counter() for path in paths if path == "load"]
        return results

    def _compute_logits(self, *args: Any, **kwargs: Any) -> Any:
        if len(self.marks) == 3:  # a load was reported
            self.marks.append(time.perf_counter())
        return self._logits(*args, **kwargs)

    def _submit(self, path: str, original: Any, job_id: int, *args: Any, **kwargs: Any) -> Any:
        self._paths[job_id], asked = path, time.perf_counter()
        result = original(job_id, *args, **kwargs)
        if path == "load":
            self.marks += [asked, time.perf_counter()]
        return result


def legs_of(started: float, marks: Sequence[float], answered: float, idle: float) -> list[float]:
    """Those of a load in one job, answered with one token."""
    if len(marks) != len(LEGS) - 2:
        return []
    times = [started, *marks, answered, idle]
    return [after - before for before, after in pairwise(times)]


def of_path(
    path: str, without: Sequence[Sequence[Served]], protected: Sequence[Sequence[Served]], blocks: int
) -> dict[str, Any]:
    """Of the phases of both sides: medians, also of the ratios of pairs, and the most."""
    sides = {
        name: [median(each.seconds for each in phase) for phase in phases]
        for name, phases in (("without", without), ("with", protected))
    }
    ratios = [after / before for before, after in zip(sides["without"], sides["with"], strict=True)]
    served = [each for phase in protected for each in phase]
    parts = sorted({part for each in served for _, part in each.parts})

    def per_block(chosen: Callable[[Iterable[float]], float]) -> dict[str, float]:
        return {
            part: round(chosen([_all_of(each, part) for each in served]) / blocks * 1e6, 2) for part in parts
        }

    found: dict[str, Any] = {
        f"{path} ms": {name: [round(each * 1e3, 3) for each in side] for name, side in sides.items()},
        f"{path} ratio": {
            "median": round(median(ratios), 4),
            "pairs": [round(each, 4) for each in ratios],
        },
        f"{path}: us per block on the thread": per_block(median),
        f"{path}: the same, the most in one request": per_block(max),
    }
    for number, leg in enumerate(LEGS):
        legs = {
            name: [each.legs[number] for phase in phases for each in phase if each.legs]
            for name, phases in (("without", without), ("with", protected))
        }
        if all(legs.values()):
            found[f"{path}, {leg}, ms"] = {name: round(median(each) * 1e3, 3) for name, each in legs.items()}
            found[f"{path}, {leg}, ms, by phase"] = {
                name: [
                    round(median(own) * 1e3, 2)
                    for phase in phases
                    if (own := [each.legs[number] for each in phase if each.legs])
                ]
                for name, phases in (("without", without), ("with", protected))
            }
            spent = {part: median(each.parts.get((number, part), 0.0) for each in served) for part in parts}
            found[f"{path}, {leg}: us on the thread"] = {
                part: round(seconds * 1e6, 1) for part, seconds in spent.items() if seconds
            }
    return found


def _all_of(served: Served, part: str) -> float:
    return sum(seconds for (_, name), seconds in served.parts.items() if name == part)
