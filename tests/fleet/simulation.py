"""A year of a fleet of 10 000 GPUs: does the verdict name failing parts, and whom does it accuse?

`python -m tests.fleet.simulation --output FILE` runs it; the slow tests run a part of it. The verdicts are
those of canary_obs.fleet, which the recording rules equal (test_rules.py). docs/fleet.md says what is drawn.
"""

from __future__ import annotations

import argparse
import json
import random
from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import exp, log
from pathlib import Path
from typing import Any

from canary_obs.fleet.evidence import Exposure, FleetEvidence, Others, Release
from canary_obs.fleet.verdict import Verdict, assess
from tests.fleet.histories import PERIOD, counted

WEEK, DAY, YEAR = 168, 24, 8760  # hours
# "The Llama 3 Herd of Models": 6 silent corruptions in 54 days of 16 384 GPUs are 25 in 10 000 GPU-years.
# "Cores that don't count": a few machines in several thousand have a core that computes wrongly.
FAILING_SHARE = 25 / 10_000 + 1 / 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is simulated. `exposures`: the largest over the smallest number of bytes verified by a GPU."""

    gpus: int = 10_000
    hours: int = YEAR
    instance: int = 8  # GPUs that serve together, on one load
    exposures: float = 100.0
    releases: int = 8  # at a time
    release_hours: int = 6 * WEEK  # until a release is replaced by the next one
    buggy_share: float = 0.25  # of releases
    roll_back_hours: int = 3 * DAY  # after a release was named, until none runs it
    seed: int = 1


@dataclass(slots=True)
class Outcome:
    """Counts, and the delays of naming in hours after the third finding."""

    failing: int = 0  # GPUs that reached a third finding, a day before the end
    named_in_a_day: int = 0
    named_later: int = 0
    never_named: int = 0
    accused: int = 0  # GPUs that are fine
    accusations: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    releases_buggy: int = 0  # with findings on three GPUs or more
    releases_named: int = 0
    findings: int = 0
    gpu_years: float = 0.0

    @property
    def power(self) -> float:
        return self.named_in_a_day / self.failing if self.failing else 1.0

    @property
    def false_per_10000_gpu_years(self) -> float:
        return self.accused / self.gpu_years * 10_000


class Simulation:
    """Draws the whole year first: findings are hours, few and sorted; exposures are constant."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._draw = plan, random.Random(plan.seed)
        self._weights = [exp(self._draw.uniform(0, log(plan.exposures))) for _ in range(plan.gpus)]
        self._line_weights: dict[int, float] = defaultdict(float)
        for gpu, weight in enumerate(self._weights):
            self._line_weights[gpu // plan.instance % plan.releases] += weight
        self._found: dict[int, list[int]] = defaultdict(list)  # hours with findings, by GPU
        self._failing: dict[int, int] = {}  # hour at which a GPU begins to fail
        self._bugs: dict[Release, dict[int, set[int]]] = defaultdict(dict)  # its hours with findings, by GPU
        self._draw_parts()
        self._draw_bugs()

    def release_of(self, gpu: int, hour: int) -> Release:
        """Instances are dealt out to lines of releases, each of which moves on in its own cycle."""
        plan = self._plan
        line = gpu // plan.instance % plan.releases
        number = (hour + line * plan.release_hours // plan.releases) // plan.release_hours
        return Release("vllm", f"{line}.{number}", f"model-{line % 4}")

    def _draw_parts(self) -> None:
        plan, draw = self._plan, self._draw
        for gpu in range(plan.gpus):
            if draw.random() < FAILING_SHARE * plan.hours / YEAR:
                self._failing[gpu] = start = draw.randrange(plan.hours)
                # From one in two weeks to two an hour: parts fail once in a million operations or always.
                per_hour = exp(draw.uniform(log(1 / (2 * WEEK)), log(2.0)))
                self._add_events(gpu, start, plan.hours, per_hour)

    def _draw_bugs(self) -> None:
        """A bug strikes in proportion to the bytes, some loads much more than others, and in bursts."""
        plan, draw = self._plan, self._draw
        for line in range(plan.releases):
            shift = line * plan.release_hours // plan.releases
            for number in range((plan.hours + shift) // plan.release_hours + 1):
                if draw.random() >= plan.buggy_share:
                    continue
                first = max(0, number * plan.release_hours - shift)
                last = min(plan.hours, (number + 1) * plan.release_hours - shift)
                # Hours with findings of a GPU of mean exposure in a week: from one in 10 000 GPUs to all.
                per_week = exp(draw.uniform(log(1e-4), log(3.0)))
                self._strike(line, first, last, per_week)

    def _strike(self, line: int, first: int, last: int, per_week: float) -> None:
        plan, draw = self._plan, self._draw
        mean = sum(self._weights) / plan.gpus
        for group in range(line, plan.gpus // plan.instance, plan.releases):
            load = draw.gammavariate(2.0, 0.5)  # of the instance: mean 1, half of its variance
            for gpu in range(group * plan.instance, (group + 1) * plan.instance):
                rate = per_week / WEEK * load * self._weights[gpu] / mean
                before = set(self._found.get(gpu, ()))
                self._add_events(gpu, first, last, rate, burst=0.3)
                if struck := set(self._found.get(gpu, ())) - before:
                    self._bugs[self.release_of(gpu, first)][gpu] = struck

    def _add_events(self, gpu: int, first: int, last: int, per_hour: float, burst: float = 0.0) -> None:
        """Hours of a Poisson process; with `burst` the next hour has findings too, with this probability."""
        at, draw = float(first), self._draw
        while (at := at + draw.expovariate(per_hour)) < last:
            hour = int(at)
            while True:
                if hour < last and hour not in self._found[gpu]:
                    insort(self._found[gpu], hour)
                if draw.random() >= burst:
                    break
                hour += 1

    def run(self) -> Outcome:
        """Judge the fleet at the end of every period of six hours."""
        plan, outcome = self._plan, Outcome()
        outcome.gpu_years = plan.gpus * plan.hours / YEAR
        outcome.findings = sum(map(len, self._found.values()))
        named: dict[int, int] = {}
        accused: set[int] = set()
        releases: set[Release] = set()
        for hour in range(PERIOD, plan.hours + 1, PERIOD):
            found = assess(self._evidence(hour))
            for suspect in found.releases:
                if suspect.release not in releases:
                    releases.add(suspect.release)
                    self._roll_back(suspect.release, hour + plan.roll_back_hours)
            for gpu in found.gpus:
                if gpu.verdict is not Verdict.SUSPECT_GPU:
                    continue
                number = int(gpu.gpu_uuid)
                if self._failing.get(number, plan.hours) < hour:
                    named.setdefault(number, hour)
                elif number not in accused:
                    accused.add(number)
                    text = f"hour {hour}: observed {gpu.observed}, expected {gpu.expected:.4f}"
                    outcome.accusations.append(f"{text}, score {gpu.score:.2f}")
        outcome.accused = len(accused)
        self._count_named(named, outcome)
        buggy = {release for release, gpus in self._bugs.items() if len(gpus) >= 3}
        outcome.releases_buggy, outcome.releases_named = len(buggy), len(buggy & releases)
        return outcome

    def _roll_back(self, release: Release, hour: int) -> None:
        """The operators go back to what worked: a bug's findings end."""
        for gpu, struck in self._bugs.get(release, {}).items():
            self._found[gpu] = [at for at in self._found[gpu] if at < hour or at not in struck]

    def _count_named(self, named: dict[int, int], outcome: Outcome) -> None:
        for gpu, start in self._failing.items():
            hours = self._found.get(gpu, [])[bisect_left(self._found.get(gpu, []), start) :]
            third = _third_period(hours)
            if third is None or third + DAY > self._plan.hours:
                continue
            outcome.failing += 1
            if gpu not in named:
                outcome.never_named += 1
                outcome.missed.append(f"third at hour {third}, {len(hours)} findings")
            elif named[gpu] <= third + DAY:
                outcome.named_in_a_day += 1
            else:
                outcome.named_later += 1

    def _evidence(self, hour: int) -> FleetEvidence:
        plan, exposures, since = self._plan, [], max(0, hour - WEEK)
        left = dict(self._line_weights)
        gpus_left = dict.fromkeys(left, plan.gpus // plan.releases)
        for gpu, found in self._found.items():
            if bisect_right(found, hour - 1) > bisect_left(found, since):
                line = gpu // plan.instance % plan.releases
                left[line] -= self._weights[gpu]
                gpus_left[line] -= 1
                for release, first, last in self._spans(line, since, hour):
                    exposures.append(
                        Exposure(
                            gpu_uuid=str(gpu),
                            release=release,
                            verified_bytes=(last - first) * self._weights[gpu],
                            periods=sum(first <= at < last for at in self._counted(gpu, since, hour)),
                        )
                    )
        others = {
            release: Others((last - first) * left[line], gpus_left[line])
            for line in left
            for release, first, last in self._spans(line, since, hour)
        }
        return FleetEvidence(exposures=tuple(exposures), others=others)

    def _counted(self, gpu: int, since: int, hour: int) -> list[int]:
        """The first hours of the periods that count, within a time."""
        found = self._found[gpu]
        # What the two periods before began may go on.
        early = found[bisect_left(found, since - 2 * PERIOD - 1) : bisect_right(found, hour - 1)]
        return [at for at in counted(early) if at >= since]

    def _spans(self, line: int, since: int, hour: int) -> Iterator[tuple[Release, int, int]]:
        """The releases of a line within a time, each with its first hour and the one after its last."""
        plan = self._plan
        shift = line * plan.release_hours // plan.releases
        first = since
        while first < hour:
            number = (first + shift) // plan.release_hours
            last = min(hour, (number + 1) * plan.release_hours - shift)
            yield self.release_of(line * plan.instance, first), first, last
            first = last


def _third_period(hours: list[int]) -> int | None:
    """The hour of a finding in a third period, the first one less than six days before."""
    starts = counted(hours)
    for first, third in zip(starts, starts[2:], strict=False):
        if third - first < WEEK - DAY:
            return third
    return None


def report(plan: Plan, outcome: Outcome) -> dict[str, Any]:
    return {
        "gpus": plan.gpus, "hours": plan.hours, "seed": plan.seed, "findings": outcome.findings,
        "failing_gpus_with_three_findings": outcome.failing, "named_within_24_h": outcome.named_in_a_day,
        "named_later": outcome.named_later, "never_named": outcome.never_named, "power": outcome.power,
        "falsely_accused": outcome.accused,
        "false_accusations_per_10000_gpu_years": outcome.false_per_10000_gpu_years,
        "accusations": outcome.accusations, "buggy_releases": outcome.releases_buggy,
        "buggy_releases_named": outcome.releases_named,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--years", type=int, default=1)
    arguments = parser.parse_args()
    plans = [Plan(seed=seed) for seed in range(1, arguments.years + 1)]
    results = [report(plan, Simulation(plan).run()) for plan in plans]
    text = json.dumps(results, indent=1)
    print(text)
    if arguments.output:
        arguments.output.write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main()
