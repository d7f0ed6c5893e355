"""Faults injected into a real vLLM by the canary itself, each mode in turn: what the ledger says of each."""

from __future__ import annotations

import logging
import os
import time
from typing import Any

from canary_obs.engines.vllm.worker import attach_to_worker, detach_from_worker
from canary_obs.records import Violation
from canary_obs.runtime.perturb.injection import Injection
from canary_obs.vocabulary import PerturbMode
from tests.engines.vllm.real.forwards import PATIENCE
from tests.engines.vllm.real.rig import Rig, prompts

PERTURB = "KV_CANARY_PERTURB"
SETTINGS = {
    f"{PERTURB}_ENABLED": "true", f"{PERTURB}_SEED": "7", f"{PERTURB}_WARMUP": "2",
    "KV_CANARY_PATROL_BUDGET": "50%", "KV_CANARY_LANE_ROWS": "1024",
}  # fmt: skip
LINKS = {"chain", "position", "unwritten", "token", "write_token"}
EXPECTED = {"req_to_token": LINKS, "next_token_swap": {"write_token", "token", "chain"}}


class _Lines(logging.Handler):
    """The canary's log, as `with` lets it collect."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> _Lines:
        logging.getLogger("canary_obs").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("canary_obs").removeHandler(self)


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
    with _Lines() as log:
        attached_anew(rig, SETTINGS | {PERTURB: f"{mode}=0.5"})
        canary, made, sent = rig.canary, list[Injection](), list[Violation]()
        assert canary.injector is not None
        injections = canary.injector.injections
        add, send = injections.add, canary.reporter.send_violations

        def added(injection: Injection) -> None:
            made.append(injection)
            add(injection)

        def sending(found: list[Violation]) -> None:
            sent.extend(found)
            send(found)

        injections.add = added  # type: ignore[method-assign]
        canary.reporter.send_violations = sending  # type: ignore[method-assign]
        for seed in range(2):
            rig.generate(prompts(6, seed=seed, shared=100, groups=3), 12)
        busy = injections.summary()[mode]
        deadline = time.monotonic() + PATIENCE
        while injections.open and time.monotonic() < deadline:
            time.sleep(0.01)  # the idle thread works on its own
        idle = injections.summary()[mode]
        rig.settle()
    found = [violation for violation in rig.found if not violation.redetection]
    return {
        "busy": busy, "idle": idle, "final": injections.summary()[mode],
        "reasons": sorted({violation.reason.value for violation in rig.found}),
        "unexplained": [repr(row) for row in rig.found if not any(one.explains(row) for one in made)],
        "counted": canary.counter_reader.log.findings,
        "unread": canary.counter_reader.violations - canary.counter_reader.log.events_read,
        "found": len(found),
        "sent": len(sent),
        "lost": canary.counter_reader.log.dropped,
        "faults": dict(canary.health.faults),
        "made": [repr(one) for one in made],
        "injected_lines": sum("fault injected: mode=" in line for line in log.lines)
        - sum("no fault injected: mode=" in line for line in log.lines),
        "skip_reasons_logged": sum("no fault injected: mode=" in line for line in log.lines),
    }  # fmt: skip


def check(report: dict[str, dict[str, Any]]) -> None:
    """Every injection is accounted for, every violation explained, and every row delivered."""
    assert report.keys() == set(PerturbMode)
    for mode, found in report.items():
        tally = found["final"]
        assert tally["injected"] >= 3, (mode, tally)
        assert (tally["missed"], tally["open"]) == (0, 0), (mode, tally, found["made"])
        assert tally["detected"] + tally["masked"] == tally["injected"], (mode, tally)
        assert tally["detected"] > 0, (mode, tally)
        assert sum(tally["masked_because"].values()) == tally["masked"]
        assert "" not in tally["masked_because"]
        assert set(found["reasons"]) <= EXPECTED.get(mode, {"kv_data"}), (mode, found["reasons"])
        assert found["unexplained"] == [], (mode, found["made"])
        assert (found["counted"], found["sent"]) == (found["found"], found["found"]), mode
        assert (found["unread"], found["lost"]) == (0, 0), mode
        assert found["faults"] == {}, mode
        assert found["injected_lines"] == tally["injected"], mode
        assert found["skip_reasons_logged"] >= len(tally["skipped"]), mode
    assert "write_token" in report["next_token_swap"]["reasons"]
    unused = report["real_kv_unused_cache"]
    assert unused["idle"]["open"] == 0, "an idle engine is checked, too"
