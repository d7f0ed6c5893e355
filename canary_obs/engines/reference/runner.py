"""Turns a plan into a flat batch, runs the model over the paged pool, and samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as functional
from numpy.typing import NDArray
from torch import Tensor

from canary_obs.engines.reference.graph import DecodeGraphs
from canary_obs.engines.reference.model import Llama
from canary_obs.engines.reference.pool import KVPool
from canary_obs.engines.reference.request import Request
from canary_obs.engines.reference.scheduler import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """One forward, flat: the tokens of all requests one after another. Tensors on the model's device."""

    requests: tuple[Request, ...]
    prefixes: tuple[int, ...]  # host copies of prefix_lens and extend_lens
    extends: tuple[int, ...]
    rows: Tensor  # int64 [num_requests]; row of req_to_token
    prefix_lens: Tensor  # int64 [num_requests]
    extend_lens: Tensor  # int64 [num_requests]
    token_starts: Tensor  # int64 [num_requests + 1]
    input_ids: Tensor  # int64 [num_tokens]
    positions: Tensor  # int64 [num_tokens]
    out_slots: Tensor  # int64 [num_tokens]


@dataclass(frozen=True, slots=True, kw_only=True)
class Padded:
    """The requests that add one token each, attended together."""

    tokens: Tensor  # int64 [n]; their places in the flat batch
    slots: Tensor  # int64 [n * width]; own first slot beyond the length
    mask: Tensor  # bool [n, 1, 1, width]; True = attend
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A request that adds several tokens."""

    start: int  # place of its first token in the flat batch
    stop: int
    slots: Tensor  # int64 [length]
    mask: Tensor  # bool [stop - start, length]; causal


class Runner:
    """Holds model and pool. `forward` is the seam: everything before and after it is bookkeeping."""

    def __init__(self, model: Llama, pool: KVPool, graphs: DecodeGraphs | None = None) -> None:
        self.model = model
        self.pool = pool
        self._graphs = graphs
        self.device = pool.kv.device
        context = pool.req_to_token.shape[1]
        self._order = torch.arange(context, device=self.device)

    def prepare(self, plan: Plan) -> ForwardBatch:
        """The flat batch of a plan; brings the slot table up to date."""
        table = self.pool.req_to_token
        for request in plan.admitted:
            table[request.row, : request.shared] = self._place(request.slots[: request.shared]).to(
                table.dtype
            )
        spans = [
            (request, request.computed, request.computed + extend)
            for request, extend in zip(plan.requests, plan.extends, strict=True)
        ]
        prefixes = tuple(request.computed for request in plan.requests)
        extend_lens = np.array(plan.extends, dtype=np.int64)
        prefix_lens = np.array(prefixes, dtype=np.int64)
        starts = np.zeros(len(spans) + 1, dtype=np.int64)
        np.cumsum(extend_lens, out=starts[1:])
        rows = np.array([request.row for request in plan.requests], dtype=np.int64)
        positions = np.arange(starts[-1]) - np.repeat(starts[:-1] - prefix_lens, extend_lens)
        batch = ForwardBatch(
            requests=plan.requests,
            prefixes=prefixes,
            extends=plan.extends,
            rows=self._place(rows),
            prefix_lens=self._place(prefix_lens),
            extend_lens=self._place(extend_lens),
            token_starts=self._place(starts),
            input_ids=self._place(np.concatenate([r.tokens[a:b] for r, a, b in spans]).astype(np.int64)),
            positions=self._place(positions),
            out_slots=self._place(np.concatenate([r.slots[a:b] for r, a, b in spans])),
        )
        table[self._place(np.repeat(rows, extend_lens)), batch.positions] = batch.out_slots.to(table.dtype)
        return batch

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Run the model and store the new KV; logits float32 [num_requests, vocab] of the last tokens."""
        if self._graphs is not None and self._graphs.takes(batch):
            return self._graphs.replay(batch)
        padded, chunks = self._padded(batch), self._chunks(batch)
        shape = self.model.shape
        groups = shape.heads // shape.kv_heads

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            self.pool.write(layer, batch.out_slots, key, value)
            mixed = torch.empty_like(query, memory_format=torch.contiguous_format)
            if padded is not None:
                # Query heads that share a KV head stand in as query positions: no repeated keys.
                keys, values = self.pool.read(layer, padded.slots)
                wide = (-1, padded.width, shape.kv_heads, shape.head_dim)
                asked = query[padded.tokens].view(-1, shape.kv_heads, groups, shape.head_dim)
                answer = functional.scaled_dot_product_attention(
                    asked,
                    keys.view(wide).transpose(1, 2),
                    values.view(wide).transpose(1, 2),
                    attn_mask=padded.mask,
                )
                mixed[padded.tokens] = answer.reshape(-1, shape.heads, shape.head_dim)
            for chunk in chunks:
                keys, values = self.pool.read(layer, chunk.slots)
                answer = functional.scaled_dot_product_attention(
                    query[chunk.start : chunk.stop].transpose(0, 1)[None],
                    keys.transpose(0, 1).repeat_interleave(groups, dim=0)[None],
                    values.transpose(0, 1).repeat_interleave(groups, dim=0)[None],
                    attn_mask=chunk.mask,
                )
                mixed[chunk.start : chunk.stop] = answer[0].transpose(0, 1)
            return mixed.view(-1, shape.heads * shape.head_dim)

        hidden = self.model.forward(batch.input_ids, batch.positions, attend)
        return self.model.logits(hidden[batch.token_starts[1:] - 1])

    def sample(self, batch: ForwardBatch, logits: Tensor) -> list[int | None]:
        """The next token of each request; None where a prompt is not through yet. Waits for the device."""
        ready = [r.computed + n == r.length for r, n in zip(batch.requests, batch.extends, strict=True)]
        drawn = [i for i, r in enumerate(batch.requests) if ready[i] and r.generator is not None]
        if drawn:
            index = torch.tensor(drawn, device=self.device)
            noise = torch.stack([self._noise(batch.requests[i], logits.shape[1]) for i in drawn])
            logits = logits.index_add(0, index, noise.to(self.device))
        tokens: list[int] = logits.argmax(dim=-1).tolist()
        return [token if wanted else None for token, wanted in zip(tokens, ready, strict=True)]

    def _noise(self, request: Request, size: int) -> Tensor:
        """Gumbel noise times temperature: the largest noisy logit is a draw from the tempered softmax."""
        exponential = torch.empty(size).exponential_(generator=request.generator)
        return exponential.log_().mul_(-request.sampling.temperature)

    def _padded(self, batch: ForwardBatch) -> Padded | None:
        singles = [i for i, extend in enumerate(batch.extends) if extend == 1]
        if not singles:
            return None
        width = max(batch.prefixes[i] for i in singles) + 1
        index = self._place(np.array(singles, dtype=np.int64))
        seen = self._order[:width] <= batch.prefix_lens[index, None]
        slots = self.pool.req_to_token[batch.rows[index], :width].long()
        # Beyond a request's length the table is stale: reading its own first slot instead keeps what
        # another request left behind (NaN included) out of this one.
        slots = torch.where(seen, slots, slots[:, :1])
        return Padded(
            tokens=batch.token_starts[index],
            slots=slots.reshape(-1),
            mask=seen[:, None, None, :],
            width=width,
        )

    def _chunks(self, batch: ForwardBatch) -> list[Chunk]:
        chunks = []
        start = 0
        for request, prefix, extend in zip(batch.requests, batch.prefixes, batch.extends, strict=True):
            if extend > 1:
                slots = self.pool.req_to_token[request.row, : prefix + extend].long()
                reach = self._order[prefix : prefix + extend, None]
                mask = self._order[: prefix + extend] <= reach
                chunks.append(Chunk(start=start, stop=start + extend, slots=slots, mask=mask))
            start += extend
        return chunks

    def _place(self, array: NDArray[np.int64]) -> Tensor:
        return placed(array, self.device)


def placed(array: NDArray[Any], device: torch.device) -> Tensor:
    """A host array on a device; through pinned memory, else the copy would wait for the stream."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
