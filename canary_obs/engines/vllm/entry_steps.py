"""Compressed entries of a forward: those of groups whose slots stand for runs of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from canary_obs.engine_api.views import GroupStep, GroupTokens, StepTypes
from canary_obs.engines.toolkit.chain_sums import ANCHOR, added_chains
from canary_obs.engines.toolkit.surrogate_tokens import surrogate_tokens
from canary_obs.engines.vllm.groups import VllmGroup

_Longs = NDArray[np.int64]
_Ints = NDArray[np.signedinteger[Any]]


class HostBatch(NamedTuple):
    """One forward, as the host has it."""

    requests: Sequence[str]
    tokens: Sequence[_Ints]  # of each request from its first on, those of this forward not needed
    before: _Longs  # [n]; tokens computed before this forward
    after: _Longs  # [n]; and after it
    input_ids: _Ints  # [num_tokens]; of the forward, request by request


class EntrySteps:
    """The entries that a forward completes, as a view's GroupSteps.

    An entry is written by the forward of the last token of its run, and stands for it with a surrogate that
    depends on all tokens of the run: those before this forward by the runner's list, the others as they were
    fed. The chain over the entries before is by the list alone, so a token that was fed wrong is seen later.
    """

    def __init__(self, groups: Sequence[VllmGroup], types: StepTypes) -> None:
        self._groups, self._types = groups, types
        self._ratios = sorted({group.entry_tokens for group in groups})
        # By ratio and request: entries of its prefix that are in the chain, and the chain.
        self._chains: dict[int, dict[str, tuple[int, np.uint64]]] = {ratio: {} for ratio in self._ratios}

    def forget(self, requests: Iterable[str]) -> None:
        """These requests ended, or have other tokens from now on."""
        for request in requests:
            for known in self._chains.values():
                known.pop(request, None)

    def steps(
        self, batch: HostBatch, tables: Mapping[int, Tensor], mappings: Mapping[str, Tensor]
    ) -> dict[str, GroupStep]:
        """By group name. tables: block tables by vLLM's group number, rows in the order of the batch.

        mappings: by group name, int64 [num_tokens] that says where each token's entry is written; -1 = it
        completes none.
        """
        found: dict[str, GroupStep] = {}
        for ratio in self._ratios:
            tokens, completing = self._tokens(batch, ratio)
            for group in self._groups:
                if group.entry_tokens == ratio:
                    slots = mappings[group.view.name][completing].to(self._types.out_slots)
                    step = GroupStep(slot_table=tables[group.number], out_slots=slots, tokens=tokens)
                    found[group.view.name] = step
        return found

    def _tokens(self, batch: HostBatch, ratio: int) -> tuple[GroupTokens, Tensor]:
        """And the place, in the forward, of the token that completes each entry."""
        first, last = batch.before // ratio, batch.after // ratio
        counts, sizes = last - first, batch.after - batch.before
        starts = np.concatenate((np.zeros(1, dtype=np.int64), counts.cumsum()))
        entries = np.arange(starts[-1]) - np.repeat(starts[:-1] - first, counts)
        begins = sizes.cumsum() - sizes  # of each request's tokens in the forward
        completing = np.repeat(begins - batch.before, counts) + (entries + 1) * ratio - 1
        types = self._types
        tokens = GroupTokens(
            prefix_lens=torch.from_numpy(first).to(types.lengths),
            extend_lens=torch.from_numpy(counts).to(types.lengths),
            token_starts=torch.from_numpy(starts).to(types.lengths),
            input_ids=torch.from_numpy(_surrogates(batch, last * ratio, begins, ratio)).to(types.input_ids),
            positions=torch.from_numpy(entries).to(types.positions),
            digests=self._digests(batch, first, ratio),
        )  # fmt: skip
        return tokens, torch.from_numpy(completing)

    def _digests(self, batch: HostBatch, first: _Longs, ratio: int) -> Tensor:
        """int64 [n]: chain over each request's first entries, as many as `first` has, int64 [n]."""
        known, count = self._chains[ratio], len(batch.requests)
        starts, chains = np.zeros(count, dtype=np.int64), np.full(count, ANCHOR, dtype=np.uint64)
        runs = [np.empty(0, dtype=np.int32)]
        for place, request in enumerate(batch.requests):
            start, chain = known.get(request, (0, ANCHOR))
            if start <= first[place]:  # else it was preempted, and is computed anew
                starts[place], chains[place] = start, chain
            if starts[place] < first[place]:
                runs.append(
                    batch.tokens[place][starts[place] * ratio : first[place] * ratio].astype(np.int32)
                )
        digests = added_chains(chains, surrogate_tokens(np.concatenate(runs), ratio), starts, first)
        known.update(zip(batch.requests, zip(first.tolist(), digests, strict=True), strict=True))
        return torch.from_numpy(digests.view(np.int64))


def _surrogates(batch: HostBatch, ends: _Longs, begins: _Longs, ratio: int) -> NDArray[np.int32]:
    """int32 [entries]: of the runs that the forward completes; `ends`: tokens in whole runs after it."""
    parts = [np.empty(0, dtype=np.int32)]
    for place in np.flatnonzero(ends > batch.before).tolist():
        before, end, begin = batch.before[place], ends[place], begins[place]
        parts.append(batch.tokens[place][before - before % ratio : before].astype(np.int32))
        parts.append(batch.input_ids[begin : begin + end - before].astype(np.int32))
    return surrogate_tokens(np.concatenate(parts), ratio)
