"""`canary-obs bench kernels`: what can be checked without a GPU."""

import pytest
import torch

from canary_kernels.bandwidth import READERS
from canary_kernels.fingerprint import plan_fingerprint
from canary_kernels.layout import RealData
from canary_obs.bench.kernels import run_kernels
from canary_obs.bench.shapes import POOLS
from canary_obs.errors import ConfigurationError


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure")
def test_refused_without_a_gpu():
    with pytest.raises(ConfigurationError, match="machine with a GPU"):
        run_kernels()


@pytest.mark.parametrize("pool", POOLS, ids=lambda pool: pool.name)
def test_pools_are_covered_to_the_last_byte(pool):
    memory = torch.empty(pool.words, dtype=torch.int32, device="meta")
    assert all(pool.words % block == 0 for block, _, _ in READERS)
    plan = plan_fingerprint(pool.sources(memory), RealData.ALL, "meta")
    assert plan.num_slots == pool.slots
    assert plan.bytes_per_slot * pool.slots == 4 * pool.words
