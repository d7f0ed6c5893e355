"""A real vLLM whose cached blocks have no history: what the canary says, and when it is `ok` again."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from canary_kernels import layout
from canary_obs.runtime import check_coverage
from canary_obs.vocabulary import State
from tests.engines.vllm.real.forwards import acknowledge
from tests.engines.vllm.real.rig import Rig, prompts

WAIT, SHARE = "adopted slots wait for a baseline", "slot checks of the last"


def tried(rig: Rig) -> dict[str, Any]:
    """By way: the verdict, the reason to look for, seconds, and whether `ok` came back by itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check_coverage, "WINDOW_SECONDS", 1.0)
        return {
            "an engine is attached warm, and idle": _tried(rig, WAIT, lambda: None),
            "checks meet adopted slots": _tried(rig, SHARE, lambda: rig.generate(_asked(), 4)),
            "every slot is adopted after a fault": _tried(rig, WAIT, lambda: _fault(rig)),
        }


def _asked() -> list[list[int]]:
    return prompts(4, seed=6, shared=100)


def _fault(rig: Rig) -> None:
    rig.canary.fault("step_view", RuntimeError("injected"))


def _tried(rig: Rig, names: str, act: Callable[[], object]) -> dict[str, Any]:
    rig.fresh()
    rig.generate(_asked(), 4)
    rig.settle()
    acknowledge(rig)
    with rig.adapter.hooks.lock:
        rig.canary.mark_ready()  # as at attach: what vLLM has cached is adopted
        started = time.monotonic()
        if names is WAIT:
            act()
        state, reasons = rig.canary.verdict()
    if names is SHARE:
        act()
        rig.step()
        state, reasons = rig.canary.verdict()
    seconds = time.monotonic() - started
    rig.canary.health.faults.clear()
    while rig.canary.verdict()[0] is not State.OK and time.monotonic() - started < 60:
        with rig.adapter.hooks.lock:
            rig.canary.idle()
    found = {"state": str(state), "reasons": list(reasons), "names": names, "seconds": seconds}
    found |= {"after": str(rig.canary.verdict()[0]), "left": _adopted(rig)}
    rig.found.clear()
    block = rig.idle_blocks()[-1]
    with rig.at_rest():
        rig.layer_cache(0, 0)[block].view(-1)[3] += 1
        found["damage"] = sorted({violation.reason.value for violation in rig.settle()})
        rig.layer_cache(0, 0)[block].view(-1)[3] -= 1
    acknowledge(rig)
    return found


def _adopted(rig: Rig) -> int:
    """Slots without a fingerprint."""
    identity = rig.canary.state.groups[0].buffers.records[:, layout.IDENTITY]
    return int((identity >> 32 & layout.STATE_MASK == layout.RecordState.ADOPTED).sum())
