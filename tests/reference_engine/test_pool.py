"""Pages have one owner, and the pool holds what was written."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from canary_obs.reference_engine.cache.pool import KVPool, PageAllocator, PoolError
from canary_obs.reference_engine.settings import TINY_SHAPE, tiny


def test_pages_are_handed_out_once() -> None:
    allocator = PageAllocator(32, 4)
    first, second = allocator.allocate(3), allocator.allocate(5)
    assert np.array_equal(np.sort(np.concatenate([first, second])), np.arange(32))
    assert allocator.free_pages == 0
    allocator.free(first)
    assert allocator.is_free(first).all()
    assert not allocator.is_free(second).any()
    assert np.array_equal(np.sort(allocator.allocate(3)), np.sort(first))


def test_too_many_pages() -> None:
    allocator = PageAllocator(8, 4)
    with pytest.raises(PoolError, match="3 pages asked for, 2 free"):
        allocator.allocate(3)
    assert allocator.free_pages == 2


def test_double_free() -> None:
    allocator = PageAllocator(32, 4)
    slots = allocator.allocate(2)
    allocator.free(slots[:4])
    with pytest.raises(PoolError, match="freed twice"):
        allocator.free(slots)
    with pytest.raises(PoolError, match="freed twice"):
        allocator.free(np.concatenate([slots[4:], slots[4:]]))
    assert allocator.free_pages == 7


@pytest.mark.parametrize("slots", [[-4, -3, -2, -1], [32, 33, 34, 35], [1, 2, 3, 4], [0, 1, 2], [3, 2, 1, 0]])
def test_unknown_slots(slots: list[int]) -> None:
    allocator = PageAllocator(32, 4)
    allocator.allocate(8)
    with pytest.raises(PoolError, match="not whole pages"):
        allocator.free(np.array(slots, dtype=np.int64))
    assert allocator.free_pages == 0


def test_broken_page_size() -> None:
    with pytest.raises(ValueError, match="multiple of the page size"):
        PageAllocator(33, 4)


def test_pool_returns_what_was_written() -> None:
    pool = KVPool(TINY_SHAPE, tiny())
    key, value = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    slots = torch.tensor([11, 0, 5])
    pool.write(1, slots, key, value)
    assert torch.equal(torch.stack(pool.read(1, slots)), torch.stack([key, value]))
    assert torch.equal(pool.kv[1, 0, slots], key)
    assert torch.equal(pool.kv[1, 1, slots], value)
    assert pool.kv[0].count_nonzero() == 0
    assert pool.kv[1].count_nonzero() == 2 * 3 * 2 * 8
