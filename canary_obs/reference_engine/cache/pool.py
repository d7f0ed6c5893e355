"""The paged KV pool: bytes, the slot table, and the page allocator."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from canary_obs.reference_engine.cache.compressed_pool import CompressedPool
from canary_obs.reference_engine.cache.entry_rows import IndexRows
from canary_obs.reference_engine.cache.storage import LayerStore, PlainStore, packed_stores, stored_plainly
from canary_obs.reference_engine.model.shapes import ModelShape
from canary_obs.reference_engine.settings import EngineConfig


class PoolError(RuntimeError):
    """The page accounting is broken: a page freed twice, or one that was never handed out."""


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
        self.withdrawn = np.zeros(self.num_pages, dtype=np.bool_)  # not handed out; free, or once it is

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
        allocated = self._stack[self._depth : self._depth + pages][::-1].copy()
        self._is_free[allocated] = False
        return self._slots_of(allocated)

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
        self._push(pages[~self.withdrawn[pages]])

    def withdraw(self, page: int) -> None:
        """Hand this page out no more; whoever has it keeps it."""
        self.withdrawn[page] = True
        kept = self._stack[: self._depth]
        kept = kept[kept != page]
        self._depth = kept.size
        self._stack[: kept.size] = kept

    def restore(self, page: int) -> None:
        """Hand a withdrawn page out again."""
        if self.withdrawn[page]:
            self.withdrawn[page] = False
            self._push(np.array([page])[self._is_free[[page]]])

    def is_free(self, slots: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether each slot's page is free."""
        return self._is_free[slots // self.page_size]

    def _push(self, pages: NDArray[np.int64]) -> None:
        self._stack[self._depth : self._depth + pages.size] = pages
        self._depth += pages.size

    def _slots_of(self, pages: NDArray[np.int64]) -> NDArray[np.int64]:
        return (pages[:, None] * self.page_size + self._offsets).reshape(-1)


class WindowPool:
    """Keys and values of the sliding-window layers, and how their slots follow from the full ones."""

    def __init__(self, shape: ModelShape, config: EngineConfig) -> None:
        device, layers = torch.device(config.device), range(shape.layers)
        windowed = [layer for layer in layers if not shape.sees_all(layer)]
        self.kv, stores = _layer_stores(shape, config, len(windowed), config.swa_slots)
        self.stores = dict(zip(windowed, stores, strict=True))  # by layer
        assert shape.window is not None
        self.window, self.num_slots = shape.window, config.swa_slots
        # int64 [num_slots of the full layers]; -1 = evicted, or never had one
        self.full_to_swa = torch.full((config.num_slots,), -1, dtype=torch.int64, device=device)
        rows = (config.max_running, config.max_context)
        self.table = torch.full(rows, -1, dtype=torch.int32, device=device)  # row x position -> slot, or -1

    def follow(self, rows: Tensor, req_to_token: Tensor) -> None:
        """Bring these rows (int64 [n]) of the table up to date with the full slots of the same rows."""
        slots = self.full_to_swa[req_to_token[rows].long()]
        self.table.index_copy_(0, rows, slots.to(self.table.dtype))


class KVPool:
    """Keys and values of every slot, and which slot holds which position of which row."""

    def __init__(self, shape: ModelShape, config: EngineConfig) -> None:
        device = torch.device(config.device)
        self.device = device
        seeing_all = [layer for layer in range(shape.layers) if shape.sees_all(layer)]
        self.kv, stores = _layer_stores(shape, config, len(seeing_all), config.num_slots)
        by_layer = dict(zip(seeing_all, stores, strict=True))
        self.window = WindowPool(shape, config) if shape.window else None
        if self.window is not None:
            by_layer |= self.window.stores
        self.stores: tuple[LayerStore, ...] = tuple(by_layer[layer] for layer in range(shape.layers))
        sizes = shape.compressed
        ratios = sorted(set(sizes.ratios)) if sizes else []
        self.compressed = tuple(CompressedPool(sizes, ratio, config) for ratio in ratios if sizes)
        self.index: IndexRows | None = None  # of sparse layers, in the slots of their tokens
        if shape.sparse is not None:
            pages = config.num_slots // config.page_size
            size = shape.sparse.size
            self.index = IndexRows(shape.layers, pages, config.page_size, size, config.device)
        self.num_slots = config.num_slots
        rows = (config.max_running, config.max_context)
        self.req_to_token = torch.zeros(rows, dtype=torch.int32, device=device)  # row x position -> slot

    @property
    def nbytes(self) -> int:
        """Bytes of everything that is kept per token, without padding."""
        held = [tensor for store in self.stores for tensor in store.tensors()]
        for pool in self.compressed:
            held += [pool.entries.rows, pool.states.rows]
        for index in (self.index, *(pool.index for pool in self.compressed)):
            held += [] if index is None else [index.keys, index.scales]
        return sum(tensor.nbytes for tensor in held)

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [n, kv_heads, head_dim] of slots int64 [n]."""
        return self.stores[layer].read(slots)

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Store key and value [n, kv_heads, head_dim] in slots int64 [n]."""
        self.stores[layer].write(slots, key, value)


def _layer_stores(
    shape: ModelShape, config: EngineConfig, layers: int, num_slots: int
) -> tuple[Tensor | None, tuple[LayerStore, ...]]:
    """Stores of some layers, and the one tensor [layers, 2, num_slots, kv_heads, head_dim] of plain ones."""
    if not stored_plainly(shape, config):
        return None, packed_stores(shape, config, layers, num_slots)
    size = (layers, 2, num_slots, shape.kv_heads, shape.head_dim)
    kv = torch.zeros(size, dtype=config.dtype, device=config.device)
    return kv, tuple(PlainStore(layer) for layer in kv)
