"""What becomes of a fault that is planted in an engine, and what an engine says when none is."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm.real.forwards import acknowledge
from tests.engines.vllm.real.rig import Rig, prompts

Plant = Callable[[Rig, pytest.MonkeyPatch], object]  # raises AssertionError where it is not found as expected


@dataclass
class EngineFaults:
    """An engine, and its faults by name."""

    rig: Rig
    faults: dict[str, Plant]


class Masked(Exception):
    """What was planted changed nothing."""


def planted(rig: Rig, plant: Plant) -> dict[str, Any]:
    """What became of a fault: found as expected, found otherwise, masked, missed, or an error."""
    began = time.monotonic()
    result: dict[str, Any] = {"verdict": "found"}
    try:
        rig.fresh()
        acknowledge(rig)
        with pytest.MonkeyPatch.context() as patch:
            plant(rig, patch)
    except Masked:
        result["verdict"] = "masked"
    except AssertionError as error:
        rig.canary.delivery.drain(5.0)  # on a GPU findings arrive later
        result = {"verdict": "otherwise" if rig.found else "missed", "why": _told(error)}
    except Exception as error:  # noqa: BLE001 - the others are still to be planted
        result = {"verdict": "error", "why": _told(error)}
    seen = {(str(row.phase), str(row.reason), row.group) for row in rig.found}
    return result | {"reasons": sorted(map(list, seen)), "seconds": round(time.monotonic() - began, 2)}


def _told(error: Exception) -> str:
    frames, trace = [], error.__traceback__
    while trace is not None:
        frames.append(f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}")
        trace = trace.tb_next
    return f"{type(error).__name__}: {str(error)[:300]} at {' '.join(frames[1:][-3:])}"


def facts(rig: Rig) -> dict[str, Any]:
    """What is measured of an engine before anything is planted: it must be quiet."""
    import vllm

    rig.generate(prompts(12), 12)
    found = [repr(row)[:300] for row in rig.settle()[:5]]
    config = rig.llm.llm_engine.vllm_config
    return {
        "vllm": vllm.__version__, "runner": type(rig.runner).__module__,
        "async_scheduling": bool(config.scheduler_config.async_scheduling),
        "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
        "groups": [group.name for group in rig.canary.state.groups],
        "coverage": rig.canary.state.coverage, "checks": rig.checks(), "violations_when_clean": found,
        "state_when_clean": list(map(str, rig.canary.verdict())),
    }  # fmt: skip


def after_all(rig: Rig) -> dict[str, Any]:
    """What is found when nothing is planted any more."""
    rig.fresh()
    acknowledge(rig)
    rig.generate(prompts(12), 12)
    found = [repr(row)[:300] for row in rig.settle()[:5]]
    faults = {part: count for part, count in rig.canary.health.faults.items() if count}
    return {
        "violations_after": found,
        "observer_faults": faults,
        "state_after": list(map(str, rig.canary.verdict())),
    }
