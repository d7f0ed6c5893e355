"""Turns a plan into a flat batch, runs the model over the paged pool, and samples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as functional
from numpy.typing import NDArray
from torch import Tensor

from canary_obs.reference_engine.cache.pool import KVPool
from canary_obs.reference_engine.execution.batch import AttentionMetadata, Chunk, ForwardBatch, Padded
from canary_obs.reference_engine.execution.graph import DecodeGraphs
from canary_obs.reference_engine.execution.runs import EntryMetadata, plan_runs
from canary_obs.reference_engine.model.llama import Llama
from canary_obs.reference_engine.model.sparse import Pick
from canary_obs.reference_engine.scheduling.request import Request
from canary_obs.reference_engine.scheduling.scheduler import Plan
from canary_obs.reference_engine.to_device import to_device


class Runner:
    """Holds model and pool: prepares batches, runs the model over them, and samples."""

    def __init__(self, model: Llama, pool: KVPool, graphs: DecodeGraphs | None = None) -> None:
        self.model = model
        self.pool = pool
        self._graphs = graphs
        self.device = pool.device
        context = pool.req_to_token.shape[1]
        self._order = torch.arange(context, device=self.device)

    def prepare(self, plan: Plan) -> ForwardBatch:
        """The flat batch of a plan; brings the slot table up to date."""
        table, window = self.pool.req_to_token, self.pool.window
        if window is not None and plan.window_changes is not None:
            changed, slots = plan.window_changes
            window.full_to_swa.index_copy_(0, self._place(changed), self._place(slots))
        for request in plan.admitted:
            table[request.row, : request.shared] = self._place(request.slots[: request.shared]).to(
                table.dtype
            )
        prefixes = tuple(request.computed for request in plan.requests)
        spans = zip(plan.requests, prefixes, plan.extends, strict=True)
        tokens = [r.tokens[start : start + extend] for r, start, extend in spans]
        # Proposals are scored, and the token before them.
        ends = zip(plan.requests, prefixes, plan.extends, strict=True)
        scores = tuple(max(1, start + extend - r.length + 1) for r, start, extend in ends)
        return self.batch(plan.requests, prefixes, plan.extends, tokens, scores)

    def batch(
        self,
        requests: tuple[Request, ...],
        prefixes: tuple[int, ...],
        extends: tuple[int, ...],
        tokens: Sequence[NDArray[np.int32]],
        scores: tuple[int, ...],
    ) -> ForwardBatch:
        """The flat batch of these tokens at positions from each prefix on; enters them in the slot table."""
        table, window = self.pool.req_to_token, self.pool.window
        extend_lens = np.array(extends, dtype=np.int64)
        prefix_lens = np.array(prefixes, dtype=np.int64)
        starts = np.zeros(len(requests) + 1, dtype=np.int64)
        np.cumsum(extend_lens, out=starts[1:])
        rows = np.array([request.row for request in requests], dtype=np.int64)
        positions = np.arange(starts[-1]) - np.repeat(starts[:-1] - prefix_lens, extend_lens)
        spans = zip(requests, prefixes, extends, strict=True)
        out_slots = self._place(np.concatenate([r.slots[a : a + n] for r, a, n in spans]))
        scored = [np.arange(end - count, end) for end, count in zip(starts[1:], scores, strict=True)]
        batch = ForwardBatch(
            requests=requests,
            prefixes=prefixes,
            extends=extends,
            rows=self._place(rows),
            prefix_lens=self._place(prefix_lens),
            extend_lens=self._place(extend_lens),
            token_starts=self._place(starts),
            input_ids=self._place(np.concatenate(tokens).astype(np.int64)),
            positions=self._place(positions),
            out_slots=out_slots,
            window_slots=window.full_to_swa[out_slots] if window is not None else None,
            runs=tuple(plan_runs(pool, requests, extends) for pool in self.pool.compressed),
            scores=scores,
            scored=self._place(np.concatenate(scored)),
        )
        table[self._place(np.repeat(rows, extend_lens)), batch.positions] = batch.out_slots.to(table.dtype)
        if window is not None:
            window.follow(batch.rows, table)
        for pool in self.pool.compressed:
            pool.follow(table)
        return batch

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Run the model and store the new KV; logits float32 [sum of scores, vocab] of the tokens scored."""
        if self._graphs is not None and self._graphs.takes(batch):
            return self._graphs.replay(batch)
        full, windowed = self._attention_metadata(batch), self._window_metadata(batch)
        shape = self.model.shape
        groups = shape.heads // shape.kv_heads

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, pick: Pick | None = None) -> Tensor:
            metadata = windowed if windowed is not None and not shape.sees_all(layer) else full
            padded = metadata.padded
            self.pool.write(layer, metadata.out_slots, key, value)
            if pick is not None and self.pool.index is not None:
                self.pool.index.write(layer, metadata.out_slots, pick.key)
            mixed = query.new_empty((*query.shape[:2], value.shape[-1]))
            if padded is not None:
                # Query heads that share a KV head stand in as query positions: no repeated keys.
                keys, values = self.pool.read(layer, padded.slots)
                wide = (-1, padded.width, shape.kv_heads)
                asked = query[padded.tokens].view(-1, shape.kv_heads, groups, query.shape[-1])
                answer = functional.scaled_dot_product_attention(
                    asked,
                    keys.view(*wide, keys.shape[-1]).transpose(1, 2),
                    values.reshape(*wide, values.shape[-1]).transpose(1, 2),
                    attn_mask=self._mask(layer, pick, padded.tokens, padded)[:, None, None],
                )
                mixed[padded.tokens] = answer.flatten(1, 2)
            for chunk in metadata.chunks:
                keys, values = self.pool.read(layer, chunk.slots)
                answer = functional.scaled_dot_product_attention(
                    query[chunk.start : chunk.stop].transpose(0, 1)[None],
                    keys.transpose(0, 1).repeat_interleave(groups, dim=0)[None],
                    values.transpose(0, 1).repeat_interleave(groups, dim=0)[None],
                    attn_mask=self._mask(layer, pick, slice(chunk.start, chunk.stop), chunk),
                )
                mixed[chunk.start : chunk.stop] = answer[0].transpose(0, 1)
            return mixed.flatten(1)

        hidden = self.model.forward(batch.input_ids, batch.positions, attend, self._entry_metadata(batch))
        return self.model.logits(hidden[batch.scored])

    def _mask(self, layer: int, pick: Pick | None, tokens: Tensor | slice, part: Padded | Chunk) -> Tensor:
        """bool [n, width]: what some tokens of the batch see of their slots; of that, what they choose."""
        index, sparse = self.pool.index, self.model.shape.sparse
        if pick is None or index is None or sparse is None:
            return part.mask
        keys = index.read(layer, part.slots).to(pick.query.dtype)
        return pick.choose(tokens, keys.view(-1, part.mask.shape[1], sparse.size), part.mask, sparse.top_k)

    def sample(self, batch: ForwardBatch, logits: Tensor) -> list[int | None]:
        """The next token of each request; None where a prompt is not through yet. Waits for the device."""
        ready = [r.computed + n == r.length for r, n in zip(batch.requests, batch.extends, strict=True)]
        drawn = [i for i, r in enumerate(batch.requests) if ready[i] and r.generator is not None]
        if drawn:
            index = torch.tensor(drawn, device=self.device)
            noise = torch.stack([self.noise(batch.requests[i], logits.shape[1]) for i in drawn])
            logits = logits.index_add(0, index, noise.to(self.device))
        tokens: list[int] = logits.argmax(dim=-1).tolist()
        for i, request in enumerate(batch.requests):
            if (oracle := request.sampling.oracle) is not None:
                tokens[i] = int(oracle.tokens(request.length, request.length + 1)[0])
        return [token if wanted else None for token, wanted in zip(tokens, ready, strict=True)]

    def noise(self, request: Request, size: int) -> Tensor:
        """Gumbel noise times temperature: the largest noisy logit is a draw from the tempered softmax."""
        exponential = torch.empty(size).exponential_(generator=request.generator)
        return exponential.log_().mul_(-request.sampling.temperature)

    def _entry_metadata(self, batch: ForwardBatch) -> EntryMetadata | None:
        """Of the compressed layers; None = the model has none."""
        if self.model.entry_rotary is None:
            return None
        return EntryMetadata(batch.runs, self.model.entry_rotary)

    def _attention_metadata(self, batch: ForwardBatch) -> AttentionMetadata:
        """Of the layers that see everything."""
        table = self.pool.req_to_token
        return AttentionMetadata(
            out_slots=batch.out_slots,
            padded=self._padded(batch, table, table.shape[1]),
            chunks=self._chunks(batch, table, table.shape[1]),
        )

    def _window_metadata(self, batch: ForwardBatch) -> AttentionMetadata | None:
        """Of the sliding-window layers; None = the model has none."""
        pool = self.pool.window
        if pool is None or batch.window_slots is None:
            return None
        return AttentionMetadata(
            out_slots=batch.window_slots,
            padded=self._padded(batch, pool.table, pool.window),
            chunks=self._chunks(batch, pool.table, pool.window),
        )

    def _padded(self, batch: ForwardBatch, table: Tensor, window: int) -> Padded | None:
        singles = [i for i, extend in enumerate(batch.extends) if extend == 1]
        if not singles:
            return None
        longest = max(batch.prefixes[i] for i in singles) + 1
        width = min(longest, window)
        index = self._place(np.array(singles, dtype=np.int64))
        lengths = batch.prefix_lens[index, None]
        if longest > window:
            places = (lengths - (window - 1)).clamp_(min=0) + self._order[:width]
            slots = table[batch.rows[index, None], torch.minimum(places, lengths)].long()
        else:
            places = self._order[:width]
            slots = table[batch.rows[index], :width].long()
        seen = places <= lengths
        # Beyond a request's length the table is stale: reading its own first slot instead keeps what
        # another request left behind (NaN included) out of this one.
        slots = torch.where(seen, slots, slots[:, :1])
        return Padded(
            tokens=batch.token_starts[index],
            slots=slots.reshape(-1),
            mask=seen,
            width=width,
        )

    def _chunks(self, batch: ForwardBatch, table: Tensor, window: int) -> list[Chunk]:
        chunks = []
        start = 0
        for request, prefix, extend in zip(batch.requests, batch.prefixes, batch.extends, strict=True):
            if extend > 1:
                first, stop = max(0, prefix - window + 1), prefix + extend
                metadata, places = self._order[prefix:stop, None], self._order[first:stop]
                slots = table[request.row, first:stop].long()
                mask = (places <= metadata) & (places > metadata - window)
                chunks.append(Chunk(start=start, stop=start + extend, slots=slots, mask=mask))
            start += extend
        return chunks

    def _place(self, array: NDArray[np.int64]) -> Tensor:
        return to_device(array, self.device)
