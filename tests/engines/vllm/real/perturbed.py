"""Faults injected into a real vLLM by the canary itself, each mode in turn: what the ledger says of each."""

from __future__ import annotations

import os
import time
from typing import Any

from canary_obs.engines.vllm.worker import attach_to_worker, detach_from_worker
from canary_obs.vocabulary import PerturbMode
from tests.engines.perturbed import PERTURB, SETTINGS, Lines, check, tally
from tests.engines.vllm.real.forwards import PATIENCE
from tests.engines.vllm.real.rig import Rig, prompts

__all__ = ["check", "tried"]


def attached_anew(rig: Rig, settings: dict[str, str]) -> None:
    """Another canary with these settings, on an engine without requests and cached blocks."""
    rig.finish()
    rig.step()
    assert rig.llm.reset_prefix_cache()
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        detach_from_worker(rig.worker)
        attach_to_worker(rig.worker)
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    rig.collect_from()
    rig.found.clear()


def tried(rig: Rig) -> dict[str, dict[str, Any]]:
    """What the ledger has of each mode, and which violations it does not explain. The canary stays clean."""
    report = {mode.value: _mode(rig, mode.value) for mode in PerturbMode}
    attached_anew(rig, {})
    return report


def _mode(rig: Rig, mode: str) -> dict[str, Any]:
    def busy() -> None:
        for seed in range(2):
            rig.generate(prompts(6, seed=seed, shared=100, groups=3), 12)

    def idle(injections: Any) -> None:
        deadline = time.monotonic() + PATIENCE
        while injections.open and time.monotonic() < deadline:
            time.sleep(0.01)  # the idle thread works on its own

    with Lines() as log:
        attached_anew(rig, SETTINGS | {PERTURB: f"{mode}=0.5"})
        return tally(rig, mode, log, busy, idle)
