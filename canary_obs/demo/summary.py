"""What a run did, and what its canary found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from canary_obs.records import Snapshot
from canary_obs.reference_engine.engine import Engine
from canary_obs.runtime.canary import CanaryRuntime

_STATISTICS = (
    "steps", "requests_finished", "tokens", "prefix_hit_tokens", "evictions", "preemptions", "aborts",
)  # fmt: skip
_PAGE_BYTES = 4096  # unit of /proc/self/statm


@dataclass(slots=True, kw_only=True)
class RunTimes:
    """Duration and memory of a run."""

    started: float  # time.monotonic()
    seconds: float = 0.0
    busy_seconds: float = 0.0  # within engine steps
    rss_early: int | None = None  # resident bytes once the run had warmed up


def summary_of(run: RunTimes, engine: Engine, canary: CanaryRuntime | None) -> dict[str, Any]:
    """JSON values; checks every slot a last time and detaches the canary."""
    statistics = engine.statistics
    summary: dict[str, Any] = {name: getattr(statistics, name) for name in _STATISTICS}
    summary |= {
        "seconds": round(run.seconds, 3),
        "step_ms": round(1e3 * run.busy_seconds / max(statistics.steps, 1), 3),
        "device": engine.config.device,
        "rss_growth_bytes": None if run.rss_early is None else resident_bytes() - run.rss_early,
    }
    if canary is None:
        return summary | {"state": "off", "violations": 0, "slots_verified": 0, "bytes_verified": 0,
                          "sweep_passes": 0, "overhead_ratio": 0.0}  # fmt: skip
    canary.check_everything()
    return summary | canary_summary(canary, canary.detach, run.busy_seconds)


def canary_summary(
    canary: CanaryRuntime, detach: Callable[[], Snapshot], busy_seconds: float
) -> dict[str, Any]:
    """JSON values: state, checks, overhead and what became of injections. Call after `check_everything`.

    `detach` ends the canary, and returns its last snapshot.
    """
    overhead = sum(canary.overhead.values())
    state, reasons = canary.verdict()
    final = detach()
    return _checks(final, canary) | {
        "state": state.value,
        "state_reasons": list(reasons),
        "overhead_ratio": round(overhead / max(busy_seconds, 1e-9), 4),
        "overhead_ms": {
            name: round(1e3 * spent / max(final.step, 1), 4) for name, spent in canary.overhead.items()
        },
        "injections": canary.injector.injections.summary() if canary.injector else None,
    }


def _checks(final: Snapshot, canary: CanaryRuntime) -> dict[str, Any]:
    verified = hashed = 0
    reasons: dict[str, int] = {}
    for group in canary.state.groups:
        counters = final.groups[group.name]
        verified += sum(counters.verified.values())
        hashed += sum(counters.hashed.values()) * group.plan.bytes_per_slot
        for by_reason in counters.violations.values():
            for reason, count in by_reason.items():
                reasons[reason.value] = reasons.get(reason.value, 0) + count
    return {
        "slots_verified": verified,
        "bytes_verified": hashed,
        "slots_unverified": sum(sum(group.unverified.values()) for group in final.groups.values()),
        "sweep_passes": sum(final.sweep_passes.values()),
        "patrol_cycles": final.patrol.cycles if final.patrol else 0,
        "violations": sum(reasons.values()),
        "violations_by_reason": {reason: count for reason, count in reasons.items() if count},
        "record_bytes": canary.state.record_bytes,
        "backend": final.backend,
        "observer_faults": final.observer_faults,
        "swa_divergence": msgspec.to_builtins(final.swa_divergence),
    }


def resident_bytes() -> int:
    """Resident memory of this process; 0 where there is no /proc."""
    try:
        fields = Path("/proc/self/statm").read_text().split()
    except OSError:
        return 0
    return int(fields[1]) * _PAGE_BYTES
