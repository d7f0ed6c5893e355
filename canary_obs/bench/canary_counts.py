"""What the canary of a measured engine checked and found, and how it launched its checks."""

from __future__ import annotations

from typing import Any

from canary_obs.runtime.canary import CanaryRuntime
from canary_obs.runtime.report.snapshot import group_counters


def canary_counts(canary: CanaryRuntime) -> dict[str, Any]:
    """Reads everything that is on its way first. JSON values."""
    canary.delivery.drain(5.0)
    counters = group_counters(canary.state, canary.counter_reader)
    state, reasons = canary.verdict()
    replays, phases = canary.checks.replays, next(iter(counters.values())).hashed
    return {
        "violations": canary.counter_reader.violations,
        "observer_faults": canary.health.faults.total(),
        "state": [state.value, *reasons],
        "forwards": max(canary.forwards.checked.values()),
        "captures": replays.captured if replays else 0,
        "replays": replays.replayed if replays else 0,  # at most two per forward
        "verified": sum(sum(group.verified.values()) for group in counters.values()),
        "hashed": {phase.value: sum(group.hashed[phase] for group in counters.values()) for phase in phases},
    }
