"""Has every engine of a bench launch kernels at the speed of one that has its GPU to itself.

A captured graph has two speeds on an H100 and an H200: from one kernel to the next it takes 0.1 us, or 0.4 to
0.5. A process begins with the slower one. It has the faster one once another process has used the GPU, until
it launches work of another priority (H100), work on many streams (H200), or some of what a canary launches:
engines that take turns would differ by that. `tests/gpu/two_speeds.py` shows it.
"""

from __future__ import annotations

from functools import cache

import torch

_STREAMS = 40  # more than the 32 that torch has; on 12 it stays fast


def launch_as_alone() -> None:
    """Give this process the speed that it has where no other one uses the GPU; nothing on a CPU.

    Call after another process has used it, and before what is measured; waits for the device.
    """
    if not torch.cuda.is_available():
        return
    number, streams = _number_and_streams()
    torch.cuda.synchronize()
    for stream in streams:
        with stream:
            number += 1
    torch.cuda.synchronize()


@cache
def _number_and_streams() -> tuple[torch.Tensor, list[torch.Stream]]:
    device = torch.device("cuda")
    streams = [torch.Stream(device, priority=-1), *(torch.Stream(device) for _ in range(_STREAMS))]
    return torch.zeros(1, device=device), streams
