"""Has every engine of a bench launch kernels at the speed of one that has its GPU to itself.

A captured graph has two speeds on an H100: from one kernel to the next it takes 0.1 us, or 0.4. A process
begins with the slower one. It has the faster one once another process has used the GPU, until it launches
work of another priority, or some of what a canary launches: engines that take turns would differ by that.
`tests/gpu/two_speeds.py` shows it.
"""

from __future__ import annotations

from functools import cache

import torch


def launch_as_alone() -> None:
    """Give this process the speed that it has where no other one uses the GPU; nothing on a CPU.

    Call after another process has used it, and before what is measured; waits for the device.
    """
    if not torch.cuda.is_available():
        return
    with _high_priority():
        torch.zeros(1, device="cuda")
    torch.cuda.synchronize()


@cache
def _high_priority() -> torch.Stream:
    return torch.Stream(torch.device("cuda"), priority=-1)
