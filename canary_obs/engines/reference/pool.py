"""The paged KV pool: bytes, the slot table, and the page allocator."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as functional
from numpy.typing import NDArray
from torch import Tensor

from canary_obs.engines.reference.model import ModelShape
from canary_obs.engines.reference.settings import EngineConfig


class PoolError(RuntimeError):
    """The engine's own bookkeeping is broken: a page freed twice, or one that was never handed out."""


class PageAllocator:
    """Hands out whole pages, last freed first. Slots are host int64 arrays."""

    def __init__(self, num_slots: int, page_size: int) -> None:
        if page_size < 1 or num_slots % page_size:
            raise ValueError(
                f"num_slots={num_slots} with page_size={page_size}: the pool holds whole pages; "
                "use a multiple of the page size"
            )
        self.page_size = page_size
        self.num_pages = num_slots // page_size
        self._stack = np.arange(self.num_pages - 1, -1, -1, dtype=np.int64)
        self._depth = self.num_pages
        self._is_free = np.ones(self.num_pages, dtype=np.bool_)
        self._offsets = np.arange(page_size, dtype=np.int64)

    @property
    def free_pages(self) -> int:
        """Pages that can be handed out now."""
        return self._depth

    def allocate(self, pages: int) -> NDArray[np.int64]:
        """Slots [pages * page_size], page by page. The caller has checked free_pages."""
        if pages > self._depth:
            raise PoolError(
                f"{pages} pages asked for, {self._depth} free; check free_pages, evict, then allocate"
            )
        self._depth -= pages
        taken = self._stack[self._depth : self._depth + pages][::-1].copy()
        self._is_free[taken] = False
        return self._slots_of(taken)

    def free(self, slots: NDArray[np.int64]) -> None:
        """Take back whole pages, given as their slots in page order."""
        pages = slots[:: self.page_size] // self.page_size
        if pages.size == 0:
            return
        if (
            pages.min() < 0
            or pages.max() >= self.num_pages
            or not np.array_equal(self._slots_of(pages), slots)
        ):
            raise PoolError(
                f"slots {slots[:8].tolist()}... are not whole pages of this pool "
                f"({self.num_pages} pages of {self.page_size}); free what allocate returned"
            )
        if self._is_free[pages].any() or np.unique(pages).size != pages.size:
            raise PoolError(
                f"page freed twice among pages {pages[:8].tolist()}...; one owner frees a page, once"
            )
        self._is_free[pages] = True
        self._stack[self._depth : self._depth + pages.size] = pages
        self._depth += pages.size

    def is_free(self, slots: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether each slot's page is free."""
        return self._is_free[slots // self.page_size]

    def _slots_of(self, pages: NDArray[np.int64]) -> NDArray[np.int64]:
        return (pages[:, None] * self.page_size + self._offsets).reshape(-1)


class KVPool:
    """Keys and values of every slot, and which slot holds which position of which row."""

    def __init__(self, shape: ModelShape, config: EngineConfig) -> None:
        device = torch.device(config.device)
        size = (shape.layers, 2, config.num_slots, shape.kv_heads, shape.head_dim)
        self.kv = torch.zeros(size, dtype=config.dtype, device=device)  # axis 1: K, V
        rows = (config.max_running, config.max_context)
        self.req_to_token = torch.zeros(rows, dtype=torch.int32, device=device)  # row x position -> slot

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [n, kv_heads, head_dim] of slots int64 [n]."""
        # Rows of a matrix: the embedding kernel copies them several times faster than general indexing.
        shape = (slots.numel(), *self.kv.shape[3:])
        key, value = self.kv[layer].flatten(2)
        return functional.embedding(slots, key).view(shape), functional.embedding(slots, value).view(shape)

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Store key and value [n, kv_heads, head_dim] in slots int64 [n]."""
        self.kv[layer, 0].index_copy_(0, slots, key)
        self.kv[layer, 1].index_copy_(0, slots, value)
