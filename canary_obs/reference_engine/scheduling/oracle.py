"""Mock traffic whose tokens are all known in advance, so that wrong inputs can be recognised."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from canary_kernels.hashing import mix64
from canary_obs.reference_engine.tokenizer import BOS


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOracle:
    """Tokens of one request from two seeds; requests that share `prefix_seed` share their first tokens."""

    seed: int
    prefix_seed: int = 0
    shared: int = 0  # leading positions that follow prefix_seed

    def tokens(self, start: int, stop: int) -> NDArray[np.int32]:
        """int32 [stop - start]: byte tokens, never a special one."""
        positions = np.arange(start, stop, dtype=np.int64)
        seeds = np.where(positions < self.shared, self.prefix_seed, self.seed)
        mixed = mix64(torch.from_numpy(seeds), torch.from_numpy(positions)).numpy()
        return ((mixed >> 8) % BOS).astype(np.int32)
