"""Why a leg's result is not clean, or does not show what the leg is there for."""

from __future__ import annotations

from typing import Any

from tests.engines.vllm.storm.legs import Leg

_ALWAYS = ("finished", "aborts")  # events of every leg
_HITS = {True: ("hit_tokens",), False: ()}
_MUST_BE_EMPTY = ("violations", "observer_faults", "rows_dropped", "messages_dropped", "service_log")
_STEPS_PER_SECOND = 0.2
_SAMPLES_PER_SECOND = 3.0
_LONGEST_GAP = 5.0  # seconds without a sample, and without a step of an engine that never rests
_RESETS_AFTER = _SWEEPS_AFTER = 180.0
_PATROL_AFTER = 60.0
_SHORTER = 0.98  # of the seconds that a leg should have run


def problems(leg: Leg, result: dict[str, Any]) -> list[str]:
    """Empty = clean, and everything that the leg claims has happened."""
    found = [f"{name}: {result[name]}" for name in _MUST_BE_EMPTY if result[name]]
    if result["loaded_seconds"] < _SHORTER * result["seconds"]:
        found.append(f"ran {result['loaded_seconds']} s instead of {result['seconds']} s")
    if leg.asynchronous and not result["async_scheduling"]:
        found.append("asynchronous scheduling was off")
    if not leg.rests and result["longest_pause"] > _LONGEST_GAP:
        found.append(f"the engine rested for {result['longest_pause']} s")
    return found + _of_events(leg, result) + _of_checks(leg, result) + _of_watch(result["watch"])


def _of_events(leg: Leg, result: dict[str, Any]) -> list[str]:
    events, expected = result["events"], [*_ALWAYS, *_HITS[leg.prefix_hits], *leg.contains]
    if leg.rests and result["seconds"] > _RESETS_AFTER:
        expected.append("resets")
    found = [f"no {event}" for event in expected if not events.get(event)]
    if events["steps"] < _STEPS_PER_SECOND * result["seconds"]:
        found.append(f"only {events['steps']} steps")
    return found


def _of_checks(leg: Leg, result: dict[str, Any]) -> list[str]:
    found = []
    for name, group in result["groups"].items():
        found += [f"nothing was {what} in group {name}" for what in ("verified", "hashed") if not group[what]]
        if group["violations"]:
            found.append(f"{group['violations']} violations were counted in group {name}")
        counts = [(result[kind] or {}).get(name) for kind in ("forwards", "forwards_checked")]
        if counts != [result["events"]["forwards"]] * 2:
            found.append(
                f"group {name}: the scheduler gave {result['events']['forwards']} forwards, "
                f"the worker counted {counts[0]}, {counts[1]} were checked"
            )
    if not result["groups"]:
        found.append("no group was checked")
    if result["steps"] != result["events"]["forwards"] * (2 if leg.draft else 1):
        found.append(f"{result['steps']} steps of {result['events']['forwards']} forwards")
    if not result["patrol_cycles"] and result["seconds"] > _PATROL_AFTER:
        found.append("no patrol cycle")
    after = _SWEEPS_AFTER if leg.rests else result["busy_sweep_after"]
    if after is not None and result["seconds"] > after:
        if not sum(result["sweeps"].values()):
            found.append("no sweep passed")
        elif leg.prefix_hits and not result["swept"]:
            found.append("no sweep that passed had anything to check")
    return found


def _of_watch(watch: dict[str, Any]) -> list[str]:
    found = [f"{name}: {watch[name]}" for name in ("bad", "warnings", "errors") if watch[name]]
    if watch["samples"] < max(1.0, _SAMPLES_PER_SECOND * watch["seconds"]):
        found.append(f"only {watch['samples']} samples in {watch['seconds']:.1f} s")
    if watch["longest_gap"] > _LONGEST_GAP:
        found.append(f"no sample for {watch['longest_gap']:.1f} s")
    if watch["probes"] != 2:
        found.append(f"{watch['probes']} of 2 probes were heard: warnings may be missing")
    if not watch["scrapes"]:
        found.append("the service was never scraped")
    elif sum(watch["service_states"].values()) != watch["scrapes"]:
        found.append(f"{watch['scrapes']} scrapes of the service had states {watch['service_states']}")
    return found


def undetected(result: dict[str, Any], reasons: frozenset[str]) -> list[str]:
    """Why a leg with a fault did not report it; empty = detected, and not before it was there."""
    found = []
    if result["before_fault"]:
        found.append(f"{result['before_fault']} violations before the fault")
    if not reasons & set(result["reasons"]):
        found.append(f"not detected: reasons are {result['reasons']} instead of one of {sorted(reasons)}")
    if not any(group["violations"] for group in result["groups"].values()):
        found.append("no violation was counted")
    found += [
        f"never violated: {states} {result['watch'][states]}"
        for states in ("states", "service_states")
        if not result["watch"][states].get("violated")
    ]
    return found + result["watch"]["errors"]
