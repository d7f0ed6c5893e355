"""A device that is behind takes the columns of a forward after the host has filled the rest of them."""

import numpy as np
import torch

from canary_kernels.checks import Backend
from canary_kernels.forward_start import start_forward
from canary_kernels.layout import TICK_BITS
from canary_obs.engines.toolkit.known_tokens import KnownTokens
from canary_obs.engines.toolkit.later import Later

CYCLES = 20_000_000  # some 10 ms


def test_rows_and_known_tokens_of_a_late_forward() -> None:
    device = torch.device("cuda", 0)
    known, clock = KnownTokens(4, device), torch.zeros(1, dtype=torch.int64, device=device)
    launches, names = known.launches(), ["a", "b", "c"]
    for step in range(1, 6):
        sent = np.array([[step, 2, 3], [4, 5, 6]], dtype=np.int64)
        known.note(names, Later(lambda sent=sent: sent))  # type: ignore[misc]
        known.begin(names, torch.tensor([step, 7, 8], dtype=torch.int32, device=device))
        torch.cuda.synchronize()
        torch.cuda._sleep(CYCLES)
        rest = launches.stage(step)
        start_forward(Backend.TRITON, clock, 1 << TICK_BITS, launches.host, 3)
        assert rest is not None
        rest()
        start_forward(Backend.TRITON, clock, 0, launches.host, 3, rows=False)
        assert known.rows[:3].tolist() == [step, 7, 8]
        assert known.columns(3).lens.tolist() == [step, 2, 3]
        assert known.columns(3).digests.tolist() == [4, 5, 6]
