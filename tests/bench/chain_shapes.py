"""GPU: times of the chain write by chunk, warps and attempts: `python -m tests.bench.chain_shapes`."""

from __future__ import annotations

from functools import partial
from unittest.mock import patch

import torch

from canary_kernels.buffers import RowBatch, allocate_buffers
from canary_kernels.checks import Backend
from canary_kernels.hashing import chain_of
from canary_kernels.layout import CHAIN
from canary_kernels.write import kernel, write_identities
from canary_obs.bench.kernels import device_us
from tests.gpu.test_look_back import batch_of

# New tokens of each request; all prefixes are empty.
WORK = {
    "1 x 8192": [8192], "1 x 300": [300], "1 x 2048": [2048], "8 x 1024": [1024] * 8, "1 x 32768": [32768],
    "1 x 131072": [131072], "256 x 1 and 8192": [1] * 256 + [8192], "256 x 1": [1] * 256,
}  # fmt: skip
SHAPES = (256, 1024, 8), (256, 1024, 4), (128, 1024, 4), (128, 512, 2), (512, 1024, 8), (256, 4096, 8)
ATTEMPTS = 32, 4, 0


def write_us(shape: tuple[int, int, int], attempts: int, batch: RowBatch, chains: torch.Tensor) -> float:
    """Microseconds of one write, after its chains were compared. Exits when one is wrong."""
    clock = torch.ones(1, dtype=torch.int64, device="cuda")
    buffers = allocate_buffers(batch.input_ids.shape[0], clock)
    with patch.multiple(kernel, _LONG=shape, _ATTEMPTS=attempts):
        us = device_us(partial(write_identities, Backend.TRITON, buffers, batch))
    if not torch.equal(buffers.records[:, CHAIN].cpu(), chains):
        raise SystemExit(f"{shape}, {attempts} attempts: the chains written are not those of the tokens")
    return us


def main() -> None:
    """One line per shape and work: microseconds for each number of attempts."""
    for name, lengths in WORK.items():
        tokens = torch.randint(0, 128_000, (sum(lengths),))
        chains = torch.cat([chain_of(part)[:-1] for part in tokens.split(lengths)])
        batch = batch_of(tokens.cuda(), lengths)
        for shape in SHAPES:
            times = (
                f"{attempts} attempts {write_us(shape, attempts, batch, chains):6.2f}"
                for attempts in ATTEMPTS
            )
            print(f"{name:18s}", shape, *times, flush=True)


if __name__ == "__main__":
    main()
