"""What tests spare Triton's interpreter: its kernels compute the same, and triton.language is as before."""

from __future__ import annotations

import os

import pytest
import torch
import triton
import triton.language as tl

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are compiled here")


@triton.jit
def _doubled(values, throws: tl.constexpr):
    tl.static_assert(not throws)
    return tl.sum(values.to(tl.int64), axis=0) * 2


@triton.jit
def _doubled_sums(source, target, size: tl.constexpr, throws: tl.constexpr):
    offsets = tl.program_id(0) * size + tl.arange(0, size)
    loaded = tl.load(source + offsets, mask=offsets != 5, other=-1)
    tl.store(target + tl.program_id(0), _doubled(loaded, throws) + _doubled(loaded.to(tl.uint8), throws))


def test_functions_that_a_kernel_calls_compute_what_they_say() -> None:
    source, target = torch.arange(12, dtype=torch.int32), torch.zeros(3, dtype=torch.int64)
    _doubled_sums[3,](source, target, size=4, throws=False)
    assert target.tolist() == [4 * 6, 2 * (4 + 6 + 7) - 2 + 2 * (4 + 6 + 7) + 2 * 255, 4 * 38]


@pytest.mark.parametrize("throws", [False, True])
def test_the_language_is_as_it_was_after_each_kernel(throws: bool) -> None:
    before = [vars(tl)["load"], vars(tl.core)["load"], vars(tl.math)["abs"], tl.tensor.to, tl.range]
    try:
        _doubled_sums[1,](torch.arange(4), torch.zeros(1, dtype=torch.int64), size=4, throws=throws)
    except triton.runtime.errors.InterpreterError:
        assert throws
    assert [vars(tl)["load"], vars(tl.core)["load"], vars(tl.math)["abs"], tl.tensor.to, tl.range] == before
