"""The decode step as captured CUDA graphs, one per batch size; smaller batches are padded."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from canary_obs.reference_engine.cache.pool import KVPool
from canary_obs.reference_engine.cache.storage import PlainStore
from canary_obs.reference_engine.model.llama import Llama
from canary_obs.reference_engine.model.sparse import Pick

if TYPE_CHECKING:
    from canary_obs.reference_engine.execution.batch import ForwardBatch

_WARM_UPS = 2


@contextmanager
def _uncollected() -> Iterator[None]:
    """No garbage collection: a capture ends with an error when graphs of an engine that is gone are freed."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Inputs:
    """What every replay reads. int64 [largest batch] each; row and slot -1 = padding."""

    input_ids: Tensor
    positions: Tensor
    rows: Tensor
    out_slots: Tensor
    window_slots: Tensor  # out_slots of the sliding-window layers, where there are any

    def take(self, batch: ForwardBatch, size: int) -> None:
        count = batch.rows.shape[0]
        for mine, theirs in (
            (self.input_ids, batch.input_ids),
            (self.positions, batch.positions),
            (self.rows, batch.rows),
            (self.out_slots, batch.out_slots),
            (self.window_slots, batch.window_slots),
        ):
            if theirs is not None:
                mine[:count].copy_(theirs)
        for padded in (self.rows, self.out_slots, self.window_slots):
            padded[count:size].fill_(-1)


class DecodeGraphs:
    """Replays the model for batches that add one token per request."""

    def __init__(self, model: Llama, pool: KVPool, largest: int) -> None:
        self._model, self._pool = model, pool
        device = pool.device
        self._sizes = [size for size in (1 << n for n in range(32)) if size < largest] + [largest]
        self._inputs = _Inputs(
            input_ids=torch.zeros(largest, dtype=torch.int64, device=device),
            positions=torch.zeros(largest, dtype=torch.int64, device=device),
            rows=torch.full((largest,), -1, dtype=torch.int64, device=device),
            out_slots=torch.full((largest,), -1, dtype=torch.int64, device=device),
            window_slots=torch.full((largest,), -1, dtype=torch.int64, device=device),
        )
        # Largest first: the smaller graphs then find their memory in its pool.
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        memory: Any = None  # the pool that all graphs share
        for size in reversed(self._sizes):
            graph, logits = self._capture(size, memory)
            self._graphs[size] = graph, logits
            memory = graph.pool()

    def takes(self, batch: ForwardBatch) -> bool:
        """Whether every request of the batch adds exactly one token."""
        return batch.extends == (1,) * len(batch.extends)

    def replay(self, batch: ForwardBatch) -> Tensor:
        """Logits float32 [num_requests, vocab], valid until the next replay."""
        count = len(batch.extends)
        size = next(size for size in self._sizes if size >= count)
        self._inputs.take(batch, size)
        graph, logits = self._graphs[size]
        graph.replay()
        return logits[:count]

    def _capture(self, size: int, memory: Any) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        side_stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side_stream):
            for _ in range(_WARM_UPS):
                self._run(size)
        torch.cuda.current_stream().wait_stream(side_stream)
        graph = torch.cuda.CUDAGraph()
        with _uncollected(), torch.cuda.graph(graph, pool=memory):
            logits = self._run(size)
        return graph, logits

    def _run(self, size: int) -> Tensor:
        from canary_obs.reference_engine.model.paged_attention import PagedAttention

        shape, inputs, pool = self._model.shape, self._inputs, self._pool
        device = pool.device
        attention = PagedAttention(size, shape.heads, shape.kv_heads, shape.head_dim, device)
        rows, positions = inputs.rows[:size], inputs.positions[:size]

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, pick: Pick | None = None) -> Tensor:
            store = pool.stores[layer]
            assert isinstance(store, PlainStore), "captured for plain pools only"
            assert pick is None
            if pool.window is None or shape.sees_all(layer):
                table, slots, window = pool.req_to_token, inputs.out_slots[:size], 0
            else:
                table, slots, window = pool.window.table, inputs.window_slots[:size], pool.window.window
            attention.store(store.kv, slots, key, value)
            return attention.attend(store.kv, query, table, rows, positions, window)

        hidden = self._model.forward(inputs.input_ids[:size], positions, attend)
        return self._model.logits(hidden)
