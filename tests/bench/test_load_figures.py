"""What is said of loads that engines with and without a canary ran in turn."""

from __future__ import annotations

from typing import Any

import pytest

from canary_obs.bench.load_figures import CONTROL, LOG, NONE, WANTED_PAIRS, LoadFigures, host_figures
from canary_obs.bench.statistics import median_ratio, rank


def answer(seconds: float, **more: Any) -> dict[str, Any]:
    return {"seconds": seconds, "tokens": 100, **more}


def host(*spent: float) -> dict[str, Any]:
    return {"host_us": {"head": [value / 2 for value in spent], "all": list(spent)}}


def test_the_ratio_is_one_of_medians_with_the_spread_of_its_pairs() -> None:
    found = median_ratio([(1.0, 1.1), (2.0, 2.0), (4.0, 8.0)], seed=1)
    assert (found["pairs"], found["none"], found["log"], found["ratio"]) == (3, 2.0, 2.0, 1.0)
    low, high = found["ratio_95"]
    assert low <= 1.0 < high
    assert found["each"] == [[1.0, 1.1], [2.0, 2.0], [4.0, 8.0]]
    assert median_ratio([(2.0, 3.0)] * 4, seed=1)["ratio_95"] == [1.5, 1.5]


@pytest.mark.parametrize(
    ("count", "share", "value"), [(100, 0.99, 99.0), (1000, 0.99, 990.0), (5, 0.5, 3.0), (1, 0.99, 1.0)]
)
def test_a_rank_is_not_exceeded_by_its_share(count: int, share: float, value: float) -> None:
    assert rank([float(number) for number in range(count, 0, -1)], share) == value


def test_throughput_and_latencies_are_judged_with_by_without() -> None:
    runs = LoadFigures(1, {"decode": 0.999})
    for _ in range(WANTED_PAIRS):
        runs.add("decode", NONE, answer(1.0, itl_ms=[10.0] * 98 + [20.0] * 2))
        runs.add("decode", LOG, answer(1.25, itl_ms=[10.0] * 98 + [30.0] * 2))
        runs.add("ttft", NONE, answer(1.0, ttft_ms=[20.0, 20.0, 90.0]))
        runs.add("ttft", LOG, answer(1.0, ttft_ms=[20.1, 20.1, 20.1]))
    figures, measures = runs.figures()["loads"]["decode"], runs.measures()
    assert (figures["throughput"]["none"], figures["throughput"]["log"]) == (100.0, 80.0)
    assert (figures["itl_p50_ms"]["ratio"], figures["itl_p99_ms"]["ratio"]) == (1.0, 1.5)
    assert {name: (measure.value, measure.goal, measure.met) for name, measure in measures.items()} == {
        "decode: throughput": (0.8, 0.999, False),
        "decode: inter-token latency p99": (1.5, 1.01, False),
        "ttft: time to first token": (1.005, 1.01, True),
        "rounds": (WANTED_PAIRS, WANTED_PAIRS, True),
    }


def test_what_equal_engines_differ_by_is_noise() -> None:
    runs = LoadFigures(1, {"decode": 0.999})
    for _ in range(2):
        runs.add("decode", NONE, answer(1.0))
        runs.add("decode", LOG, answer(1.0))
        runs.add("decode", CONTROL, answer(0.8))
    assert runs.figures()["loads"]["decode"]["control"]["throughput"]["ratio"] == 1.25
    measures = runs.measures()
    assert measures["decode: throughput"].noise == 0.25
    assert not measures["rounds"].met


def test_host_time_is_judged_over_all_steps_of_all_rounds() -> None:
    runs = LoadFigures(1, {})
    runs.add("batch-8", LOG, host(*[80.0] * 99, 400.0))
    runs.add("batch-8", LOG, host(*[120.0] * 60, *[90.0] * 39, 100.0))
    found = runs.figures()["loads"]["batch-8"]["host_us"]
    assert (found["all"]["p50"], found["all"]["p99"], found["all"]["count"]) == (90.0, 120.0, 200)
    assert found["all"]["p50_of_rounds"] == [80.0, 120.0]
    assert (found["head"]["p50"], found["per"]) == (45.0, "step")
    assert found["slowest"][:2] == [{"head": 200.0, "all": 400.0}, {"head": 60.0, "all": 120.0}]
    assert len(found["slowest"]) == 8
    measures = runs.measures()
    median, tail = (measures[f"batch-8: host time {name}, us"] for name in ("p50", "p99"))
    assert (median.value, median.noise, median.goal, median.met) == (90.0, 20.0, 100.0, True)
    assert (tail.value, tail.goal, tail.met) == (120.0, 150.0, True)


def test_allocations_of_pinned_memory_are_shown_by_round_and_engine() -> None:
    runs = LoadFigures(1, {})
    assert "pinned" not in figures_of(runs, answer(1.0))
    runs = LoadFigures(1, {})
    several = [answer(1.0, pinned={"allocations": count, "us": 10 * count}) for count in (3, 0)]
    assert figures_of(runs, *several)["pinned"] == {LOG: {"allocations": [3, 0], "us": [30, 0]}}


def figures_of(runs: LoadFigures, *answers: dict[str, Any]) -> dict[str, Any]:
    for each in answers:
        runs.add("decode", LOG, each)
    found: dict[str, Any] = runs.figures()["loads"]["decode"]
    return found


def test_a_load_without_a_canary_has_no_host_time() -> None:
    assert host_figures([answer(1.0, host_us={})]) == {}
