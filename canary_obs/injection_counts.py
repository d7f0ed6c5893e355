"""How injected faults ended: the part of a snapshot that perturbation fills."""

from __future__ import annotations

import msgspec

# Upper bounds in seconds, from one decode step to the slowest patrol cycle that is still healthy.
LATENCY_BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 3600.0)


class Latencies(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A histogram: counts of latencies up to each of LATENCY_BOUNDS and above the previous bound."""

    counts: tuple[int, ...] = (0,) * (len(LATENCY_BOUNDS) + 1)  # the last counts those above all bounds
    seconds: float = 0.0  # sum of all latencies


class PerturbCount(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Injections of one perturbation mode, by outcome."""

    injected: int = 0
    detected: int = 0
    masked: int = 0
    missed: int = 0
    open: int = 0
    latency: Latencies = Latencies()  # of detected ones, to the violation's arrival on the host
