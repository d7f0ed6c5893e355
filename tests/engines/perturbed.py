"""Faults that the canary injects into a real engine, each mode in turn: what the ledger says of each."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from canary_obs.records import Violation
from canary_obs.runtime.perturb.injection import Injection
from canary_obs.vocabulary import PerturbMode

PERTURB = "KV_CANARY_PERTURB"
SETTINGS = {
    f"{PERTURB}_ENABLED": "true", f"{PERTURB}_SEED": "7", f"{PERTURB}_WARMUP": "2",
    "KV_CANARY_PATROL_BUDGET": "50%", "KV_CANARY_LANE_ROWS": "1024",
}  # fmt: skip
LINKS = {"chain", "position", "unwritten", "token", "write_token"}
EXPECTED = {"req_to_token": LINKS, "next_token_swap": {"write_token", "token", "chain"}}


class Lines(logging.Handler):
    """The canary's log, as `with` lets it collect."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> Lines:
        logging.getLogger("canary_obs").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("canary_obs").removeHandler(self)


def tally(
    rig: Any, mode: str, log: Lines, busy: Callable[[], None], idle: Callable[[Any], None]
) -> dict[str, Any]:
    """What the ledger has of a mode, and which violations it does not explain.

    `rig` has a canary that injects; `busy` sends requests, `idle` lets an engine without any work until no
    injection is open.
    """
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
    busy()
    after_busy = injections.summary()[mode]
    idle(injections)
    after_idle = injections.summary()[mode]
    rig.settle()
    found = [violation for violation in rig.found if not violation.redetection]
    return {
        "busy": after_busy,
        "idle": after_idle,
        "final": injections.summary()[mode],
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
    }


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
