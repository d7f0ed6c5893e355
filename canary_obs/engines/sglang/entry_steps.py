"""Compressed entries of a forward: those of a group whose slots stand for runs of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from canary_obs.engine_api.views import GroupStep, GroupTokens
from canary_obs.engines.toolkit.chain_sums import ANCHOR, added_chains, token_array
from canary_obs.engines.toolkit.surrogate_tokens import surrogate_tokens

_Longs = NDArray[np.int64]


class EntrySteps:
    """Entries of one ratio. Each has the surrogate token of its run, and the slot of the run's last token."""

    def __init__(self, table: Tensor, ratio: int) -> None:
        self._table, self._ratio = table, ratio
        self._entries = torch.zeros((table.shape[0], table.shape[1] // ratio), dtype=table.dtype)
        # By request: entries of its prefix that are in the chain, and the chain.
        self._chains: WeakKeyDictionary[Any, tuple[int, np.uint64]] = WeakKeyDictionary()

    def build(self, batch: Any, requests: Sequence[Any], prefixes: _Longs, ends: _Longs) -> GroupStep:
        """`prefixes` and `ends`: tokens of each request before and after the forward, int64 [n] each."""
        ratio = self._ratio
        first, last = prefixes // ratio, ends // ratio
        counts = last - first
        before = np.cumsum(counts) - counts
        entries = np.arange(counts.sum()) - np.repeat(before - first, counts)
        firsts = np.cumsum(ends - prefixes) - (ends - prefixes)  # of each request's tokens in the forward
        # The token that completes a run writes its entry.
        completing = np.repeat(firsts - prefixes, counts) + (entries + 1) * ratio - 1
        inputs: _Longs = batch.input_ids.numpy()
        starts = torch.from_numpy(np.concatenate((before, [entries.size])))
        tokens = GroupTokens(
            prefix_lens=torch.from_numpy(first),
            extend_lens=torch.from_numpy(counts),
            token_starts=starts,
            input_ids=torch.from_numpy(self._surrogates(requests, inputs, prefixes, last, firsts)),
            positions=torch.from_numpy(entries),
            digests=self._digests(requests, first),
        )
        rows, longest = batch.req_pool_indices, int(last.max(initial=0))
        # Only what belongs to whole runs: beyond them a row may hold anything.
        held = self._table[rows, ratio - 1 : longest * ratio : ratio]
        self._entries[rows, :longest] = torch.div(held, ratio, rounding_mode="floor")
        out = torch.div(batch.out_cache_loc[torch.from_numpy(completing)], ratio, rounding_mode="floor")
        return GroupStep(slot_table=self._entries, out_slots=out.to(torch.int64), tokens=tokens)

    def _surrogates(
        self, requests: Sequence[Any], inputs: _Longs, prefixes: _Longs, last: _Longs, firsts: _Longs
    ) -> _Longs:
        """int64 [entries]: of the runs that the forward completes, with its own inputs."""
        ratio, parts = self._ratio, [np.empty(0, dtype=np.int32)]
        for request, prefix, end, start in zip(requests, prefixes, last * ratio, firsts, strict=True):
            if end > prefix:
                parts.append(token_array(_tokens(request, prefix - prefix % ratio, prefix)))
                parts.append(inputs[start : start + end - prefix].astype(np.int32))
        return surrogate_tokens(np.concatenate(parts), ratio).astype(np.int64)

    def _digests(self, requests: Sequence[Any], first: _Longs) -> Tensor:
        """int64 [n]: chain over each request's first entries, as many as `first` has, int64 [n]."""
        count, ratio = len(requests), self._ratio
        starts, chains = np.zeros(count, dtype=np.int64), np.full(count, ANCHOR, dtype=np.uint64)
        new = list[int]()
        for place, request in enumerate(requests):
            start, chain = self._chains.get(request, (0, ANCHOR))
            if start <= first[place]:  # else it was retracted, and is computed anew
                starts[place], chains[place] = start, chain
            new += _tokens(request, int(starts[place]) * ratio, int(first[place]) * ratio)
        digests = added_chains(chains, surrogate_tokens(token_array(new), ratio), starts, first)
        for request, held, chain in zip(requests, first.tolist(), digests, strict=True):
            self._chains[request] = held, chain
        return torch.from_numpy(digests.view(np.int64))


def _tokens(request: Any, start: int, stop: int) -> list[int]:
    """Of a request's prompt and what follows it."""
    prompt, output = request.origin_input_ids, request.output_ids
    length = len(prompt)
    found = list(prompt[start:stop]) if start < length else []
    if stop > length:
        found += output[max(start - length, 0) : stop - length]
    return found
