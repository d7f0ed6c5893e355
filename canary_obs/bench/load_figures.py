"""Figures of loads that engines with and without a canary ran in turn: throughput, latencies, host time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from canary_obs.bench.result import Measure
from canary_obs.bench.statistics import Pairs, median_ratio, rank
from canary_obs.bench.step_log import Answer

NONE, LOG, CONTROL = "none", "log", "control"  # engines; the control has no canary either
WANTED_PAIRS = 8
LATENCY_GOAL = 1.01  # with / without
_PERCENTILES = {"p50": 0.5, "p99": 0.99}
_SLOWEST = 8  # steps that are shown
HOST_GOALS_US = {"p50": 100.0, "p99": 150.0}  # of a steady step
# By figure: its value in one answer, if the load has it.
_VALUES: dict[str, Callable[[Answer], float | None]] = {
    "throughput": lambda answer: None if "ttft_ms" in answer else answer["tokens"] / answer["seconds"],
    "ttft_ms": lambda answer: rank(answer["ttft_ms"], 0.5) if answer.get("ttft_ms") else None,
    "itl_p50_ms": lambda answer: rank(answer["itl_ms"], 0.5) if answer.get("itl_ms") else None,
    "itl_p99_ms": lambda answer: rank(answer["itl_ms"], 0.99) if answer.get("itl_ms") else None,
}
_GOALS = {"ttft_ms": LATENCY_GOAL, "itl_p99_ms": LATENCY_GOAL}  # next to that of the throughput
_SAID = {
    "throughput": "throughput", "ttft_ms": "time to first token", "itl_p99_ms": "inter-token latency p99",
}  # fmt: skip


class LoadFigures:
    """Answers of each load, round by round, and what follows from them."""

    def __init__(self, seed: int, throughput_goals: dict[str, float]) -> None:
        """Goals by load: the least throughput, with / without. A load that only LOG runs has host times."""
        self._seed, self._goals = seed, throughput_goals
        self._answers: dict[str, dict[str, list[Answer]]] = {}

    def add(self, load: str, engine: str, answer: Answer) -> None:
        """An engine has run a load."""
        self._answers.setdefault(load, {}).setdefault(engine, []).append(answer)

    def figures(self) -> dict[str, Any]:
        """Per load: each figure with its ratio with / without, that of the control, and host times."""
        loads: dict[str, Any] = {}
        for load, answers in self._answers.items():
            loads[load] = {
                name: median_ratio(pairs, self._seed)
                for name in _VALUES
                if (pairs := self._pairs(load, name, LOG))
            }
            if CONTROL in answers:
                loads[load]["control"] = {
                    name: {key: found[key] for key in ("ratio", "ratio_95")}
                    for name in loads[load]
                    if (found := median_ratio(self._pairs(load, name, CONTROL), self._seed))
                }
            loads[load]["host_us"] = host_figures(answers.get(LOG, []))
            if pinned := {name: each for name in answers if (each := pinned_figures(answers[name]))}:
                loads[load]["pinned"] = pinned
        return {"loads": loads}

    def measures(self) -> dict[str, Measure]:
        """Ratios with their goals, host times of the steady batches, and the number of rounds."""
        found: dict[str, Measure] = {}
        for load, figures in self.figures()["loads"].items():
            for name, said in _SAID.items():
                if name in figures:
                    control = figures.get("control", {}).get(name, {}).get("ratio", 1.0)
                    found[f"{load}: {said}"] = self._ratio_measure(load, name, figures[name], control)
            if load.startswith("batch-"):
                found |= host_measures(load, figures["host_us"], HOST_GOALS_US)
        rounds = min((len(answers[LOG]) for answers in self._answers.values()), default=0)
        return found | {"rounds": Measure(value=rounds, better="higher", goal=WANTED_PAIRS)}

    def _ratio_measure(self, load: str, name: str, figures: dict[str, Any], control: float) -> Measure:
        low, high = figures["ratio_95"]
        # What two equal engines differ by is noise as well.
        noise = max(round((high - low) / 2, 5), round(abs(control - 1), 5))
        if name == "throughput":
            goal = self._goals.get(load)
            return Measure(value=figures["ratio"], better="higher", noise=noise, goal=goal)
        return Measure(value=figures["ratio"], noise=noise, goal=_GOALS.get(name))

    def _pairs(self, load: str, name: str, other: str) -> Pairs:
        answers = self._answers[load]
        if NONE not in answers or other not in answers:
            return []
        columns = [[_VALUES[name](answer) for answer in answers[engine]] for engine in (NONE, other)]
        return [
            (none, log) for none, log in zip(*columns, strict=True) if none is not None and log is not None
        ]


def host_figures(answers: Sequence[Answer]) -> dict[str, Any]:
    """By hook, and in all: percentiles over all steps (or requests), and those of each round.

    `slowest`: what each hook took in the steps that took longest in all.
    """
    rounds = [answer["host_us"] for answer in answers if answer.get("host_us")]
    if not rounds:
        return {}
    figures: dict[str, Any] = {"per": answers[0].get("host_per", "step")}
    for hook in sorted(set().union(*rounds)):
        columns = [column for each in rounds if (column := each.get(hook))]
        every = [value for column in columns for value in column]
        figures[hook] = {name: rank(every, share) for name, share in _PERCENTILES.items()}
        figures[hook] |= {
            f"{name}_of_rounds": [rank(column, share) for column in columns]
            for name, share in _PERCENTILES.items()
        }
        figures[hook]["count"] = len(every)
    steps = [
        {hook: values[number] for hook, values in each.items()}
        for each in rounds
        for number in range(len(each["all"]))
    ]
    slowest = sorted(steps, key=itemgetter("all"), reverse=True)[:_SLOWEST]
    figures["slowest"] = [{hook: us for hook, us in step.items() if us} for step in slowest]
    return figures


def pinned_figures(answers: Sequence[Answer]) -> dict[str, Any]:
    """Of each round: how often pinned memory was allocated, and the microseconds; empty without a GPU."""
    rounds = [answer["pinned"] for answer in answers if "pinned" in answer]
    return {name: [each[name] for each in rounds] for name in ("allocations", "us")} if rounds else {}


def host_measures(load: str, figures: dict[str, Any], goals: Mapping[str, float]) -> dict[str, Measure]:
    """Host time of a steady step in all hooks; half the range of the rounds is noise."""
    spent = figures["all"]
    return {
        f"{load}: host time {name}, us": Measure(
            value=spent[name],
            noise=round((max(spent[f"{name}_of_rounds"]) - min(spent[f"{name}_of_rounds"])) / 2, 1),
            goal=goals.get(name),
        )
        for name in _PERCENTILES
    }
