"""What the storm calls clean, how it divides its time, and that a leg cannot fail unseen."""

from __future__ import annotations

import copy
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm.storm import __main__ as storm
from tests.engines.vllm.storm.faults import FAULTS
from tests.engines.vllm.storm.leg import prepare
from tests.engines.vllm.storm.legs import HOUR, LEGS, Leg, leg_seconds
from tests.engines.vllm.storm.problems import problems, undetected
from tests.engines.vllm.storm.watch import Watch

LEG = Leg(share=1, contains=("preemptions",), asynchronous=True)
BUSY = Leg(share=1, rests=False)
CLEAN: dict[str, Any] = {
    "seconds": 200.0, "loaded_seconds": 200.1, "longest_pause": 0.1, "async_scheduling": True, "swept": 900,
    "busy_sweep_after": None, "steps": 500, "forwards": {"full": 500}, "forwards_checked": {"full": 500},
    "events": {
        "finished": 9, "aborts": 1, "hit_tokens": 5, "preemptions": 2, "resets": 1, "steps": 510,
        "forwards": 500,
    },
    "groups": {"full": {"verified": 7, "hashed": 7, "violations": 0, "unverified": {}}},
    "sweeps": {"idle": 2}, "patrol_cycles": 4, "violations": [], "observer_faults": {}, "rows_dropped": 0,
    "messages_dropped": 0, "service_log": [], "before_fault": 0, "reasons": [],
    "watch": {
        "samples": 900, "seconds": 197.0, "longest_gap": 0.9, "scrapes": 90, "states": {"ok": 900},
        "service_states": {"ok": 90}, "bad": [], "warnings": [], "probes": 2, "errors": [],
    },
}  # fmt: skip


def changed(path: str, value: object) -> dict[str, Any]:
    result = copy.deepcopy(CLEAN)
    *keys, last = path.split("/")
    inner = result
    for key in keys:
        inner = inner[key]
    inner[last] = value
    return result


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        ("loaded_seconds", 150.0, "ran 150.0 s instead of 200.0 s"),
        ("async_scheduling", False, "asynchronous scheduling was off"),
        ("violations", ["one"], "violations: ['one']"),
        ("service_log", ["error"], "service_log: ['error']"),
        ("events/preemptions", 0, "no preemptions"),
        ("events/resets", 0, "no resets"),
        ("events/hit_tokens", 0, "no hit_tokens"),
        ("events/steps", 30, "only 30 steps"),
        ("groups/full/verified", 0, "nothing was verified in group full"),
        ("groups/full/hashed", 0, "nothing was hashed in group full"),
        ("groups/full/violations", 3, "3 violations were counted in group full"),
        ("groups", {}, "no group was checked"),
        ("forwards", None, "the worker counted None, 500 were checked"),
        ("forwards/full", 499, "the worker counted 499, 500 were checked"),
        ("forwards_checked/full", 499, "the worker counted 500, 499 were checked"),
        ("steps", 499, "499 steps of 500 forwards"),
        ("patrol_cycles", 0, "no patrol cycle"),
        ("sweeps", {"idle": 0}, "no sweep passed"),
        ("swept", 0, "no sweep that passed had anything to check"),
        ("watch/bad", ["blind"], "bad: ['blind']"),
        ("watch/warnings", ["late"], "warnings: ['late']"),
        ("watch/errors", ["KeyError"], "errors: ['KeyError']"),
        ("watch/samples", 500, "only 500 samples in 197.0 s"),
        ("watch/longest_gap", 5.5, "no sample for 5.5 s"),
        ("watch/probes", 1, "1 of 2 probes were heard"),
        ("watch/scrapes", 0, "the service was never scraped"),
        ("watch/service_states", {}, "90 scrapes of the service had states {}"),
    ],
)
def test_each_of_these_is_a_problem(path: str, value: object, problem: str) -> None:
    assert problems(LEG, CLEAN) == []
    (found,) = problems(LEG, changed(path, value))
    assert problem in found


def test_a_leg_that_never_rests() -> None:
    result = changed("sweeps", {"idle": 0})
    assert problems(BUSY, result) == []
    assert problems(BUSY, result | {"busy_sweep_after": 190.0}) == ["no sweep passed"]
    assert problems(BUSY, result | {"longest_pause": 6.0}) == ["the engine rested for 6.0 s"]


def test_a_short_leg_needs_no_sweep_reset_or_cycle() -> None:
    result = CLEAN | {"seconds": 50.0, "patrol_cycles": 0, "sweeps": {}, "swept": 0}
    result["events"] = CLEAN["events"] | {"resets": 0}
    assert problems(LEG, result) == []


def test_minimum_seconds_hold_whatever_legs_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(40):
        monkeypatch.setitem(LEGS, f"further{number}", Leg(share=2))
    found = leg_seconds(LEGS, HOUR)
    assert found["pressure"] == 600.0
    assert sum(found.values()) == pytest.approx(HOUR)
    assert leg_seconds(LEGS, HOUR / 10)["pressure"] == 60.0
    monkeypatch.setitem(LEGS, "endless", Leg(share=1, minimum=HOUR - 500))
    with pytest.raises(ValueError, match=r"\['endless', 'pressure'\] are longer than the storm of 3600 s"):
        leg_seconds(LEGS, HOUR)


def test_legs_of_an_hour_are_long_enough_to_demand_resets_and_sweeps() -> None:
    found = leg_seconds(LEGS, HOUR)
    assert sum(found.values()) == pytest.approx(HOUR)
    assert not LEGS["pressure"].rests
    assert found["pressure"] >= 600.0
    assert min(found.values()) > 180.0
    assert all(leg.reason for leg in LEGS.values() if not leg.expected)
    assert any(leg.asynchronous for leg in LEGS.values())


def test_a_fault_must_be_reported_and_only_then() -> None:
    reasons = frozenset({"kv_data"})
    seen = changed("watch/states", {"ok": 3, "violated": 5}) | {"reasons": ["kv_data"]}
    seen["watch"]["service_states"] = {"violated": 1}
    seen["groups"] = {"full": CLEAN["groups"]["full"] | {"violations": 4}}
    assert undetected(seen, reasons) == []
    assert undetected(seen | {"before_fault": 2}, reasons) == ["2 violations before the fault"]
    assert "not detected" in undetected(seen | {"reasons": ["token"]}, reasons)[0]
    assert len(undetected(CLEAN, reasons)) == 4


def leg_result(name: str, *found: str, **more: object) -> dict[str, Any]:
    return {"leg": name, "problems": list(found), "expected": True, "reason": "", **more}


def test_when_a_storm_succeeds() -> None:
    clean, bad = leg_result("a"), leg_result("b", "violations")
    known = leg_result("b", "violations", expected=False)
    crashed = {"leg": "b", "crashed": True, "problems": ["exit status 1"], "expected": False}
    assert storm.succeeded([clean, leg_result("b")], "ab", fault="")
    assert storm.succeeded([clean, known], "ab", fault="")
    for other in (bad, crashed):
        assert not storm.succeeded([clean, other], "ab", fault="")
    assert not storm.succeeded([clean], "ab", fault="")
    # With a fault, problems are reasons why it was not detected.
    for other in (bad, known, crashed):
        assert not storm.succeeded([clean, other], "ab", fault="table")
    assert set(FAULTS) == set(storm._FAULTS)


def test_legs_that_crash_or_hang_do_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    programs = {
        "llama": "import json, sys; json.dump({'leg': 'llama', 'problems': [], 'expected': True}, "
        "open(sys.argv[-1], 'w'))",
        "pressure": "raise SystemExit('out of memory')",
        "v2": "import time; time.sleep(60)",
    }

    def own(command: list[str], log: Any, patience: float) -> str | None:
        name, output = command[3], command[6]
        return ended([sys.executable, "-c", programs[name], output], log, 3.0)

    ended = storm._ended
    monkeypatch.setattr(storm, "_ended", own)
    names = [text for name in programs for text in ("--leg", name)]
    output = tmp_path / "storm.json"
    assert storm.main([*names, "--minutes", "1", "--processes", "3", "--output", str(output)]) == 1
    legs = {leg["leg"]: leg["problems"] for leg in json.loads(output.read_text())["legs"]}
    assert legs["llama"] == []
    assert legs["pressure"] == ["exit status 1: out of memory\n"]
    assert legs["v2"] == ["did not end within 3 s: "]


def test_inherited_settings_are_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    inherited = {"KV_CANARY_IDLE_SWEEP": "false", "KV_CANARY_MODE": "none", "kv_canary_config": "x", "A": "b"}
    monkeypatch.setattr(os, "environ", dict(inherited))
    prepare(LEGS["llama"], tmp_path)
    own = {name for name in os.environ if name.upper().startswith("KV_CANARY_")}
    assert own == {f"KV_CANARY_{name}" for name in ("MODE", "SERVE", "PORT", "ENDPOINT", "LOG_FILE")}
    assert os.environ["KV_CANARY_MODE"] == "log"
    assert os.environ["A"] == "b"


def test_a_watch_that_fails_says_so_and_goes_on() -> None:
    calls: list[int] = []

    def verdict() -> tuple[str, tuple[str, ...]]:
        calls.append(0)
        if len(calls) == 2:
            raise KeyError("group")
        return "ok", ()

    watch = Watch(verdict, time.monotonic() - 60.0, ("ok",), None)
    watch.start()
    while len(calls) < 4:
        time.sleep(0.01)
    seen = watch.stop()
    assert seen.samples == len(calls) - 1
    (error,) = seen.errors
    assert "KeyError: 'group'" in error
    assert (seen.probes, seen.warnings, seen.bad) == (2, [], [])
    assert 0.1 < seen.longest_gap < 5.0
    assert seen.seconds > 0.5
