"""Has the engines of a bench take turns on one core of the host.

Cores of one host differ by more than a canary costs a host-bound model: two engines without a canary, each
where the host had put it, took 3.53 and 3.20 ms for a step (medians of four rounds).
"""

from __future__ import annotations

import os

import torch

_CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []  # before any choice


def take_core(round_number: int) -> None:
    """Run the calling thread on the core of this round, the same one for every engine on its GPU.

    Nothing on a CPU, where an engine computes on all cores, and where a system has no affinity.
    """
    if _CORES and torch.cuda.is_available():
        place = round_number + _first_gpu() * len(_CORES) // 2
        os.sched_setaffinity(0, {_CORES[place % len(_CORES)]})


def _first_gpu() -> int:
    """By CUDA_VISIBLE_DEVICES: benches of two GPUs that run at once must not share a core."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0]
    return int(first) if first.isdecimal() else 0
