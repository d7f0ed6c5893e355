"""Has the engines of a bench take turns on one core of the host.

Cores of one host differ by more than a canary costs a host-bound model: two engines without a canary, each
where the host had put it, took 3.53 and 3.20 ms for a step (medians of four rounds).
"""

from __future__ import annotations

import os

import torch

_CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []  # before any choice


def take_core(round_number: int) -> None:
    """Run the calling thread on the core of this round, the same one for every engine.

    Nothing on a CPU, where an engine computes on all cores, and where a system has no affinity.
    """
    if _CORES and torch.cuda.is_available():
        os.sched_setaffinity(0, {_CORES[round_number % len(_CORES)]})
