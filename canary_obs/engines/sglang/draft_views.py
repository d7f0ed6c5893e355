"""Views of the forwards of SGLang's draft models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from canary_obs.engine_api.views import GroupStep, GroupTokens, StepView
from canary_obs.engines.sglang.groups import DRAFT
from canary_obs.engines.sglang.request_chains import RequestChains


class DraftViews:
    """Views of the forwards that extend the draft model's KV, where slot p is given the token of p + 1.

    What drafting itself writes before, in one graph or several forwards, is written again by the next of
    these: until then its slots have no record. A prefix cache that is matched by pairs of tokens knows
    both of a slot. One that is matched by single tokens may hand out a last slot whose next token is another
    request's: there each slot's entry is its own token, by the inputs, which come one slot earlier.
    """

    def __init__(self, scheduler: Any, table: Tensor) -> None:
        self._table = table
        self._pairs = bool(scheduler.spec_algorithm.is_eagle())
        self._chains = RequestChains(first=int(self._pairs))

    def build(self, batch: Any, requests: Sequence[Any]) -> StepView:
        """Of a forward batch of the draft model, and the requests in it."""
        extends = batch.extend_seq_lens.to(torch.int64)
        prefixes = batch.seq_lens.to(torch.int64) - extends
        starts = torch.zeros(extends.shape[0] + 1, dtype=torch.int64)
        torch.cumsum(extends, 0, out=starts[1:])
        before = prefixes.numpy()
        chains = self._chains.advance(requests, before, before + extends.numpy())
        tokens = GroupTokens(
            prefix_lens=prefixes,
            extend_lens=extends,
            token_starts=starts,
            input_ids=batch.input_ids if self._pairs else _own_tokens(batch, requests, before, starts),
            positions=batch.positions,
            # Of what is new, the target's forward compares the same tokens.
            digests=torch.from_numpy(chains.digests),
        )
        step = GroupStep(slot_table=self._table, out_slots=batch.out_cache_loc, tokens=tokens)
        return StepView(
            request_ids=[request.rid for request in requests],
            rows=batch.req_pool_indices,
            prefix_lens=prefixes + 1,
            extend_lens=extends,
            token_starts=starts,
            input_ids=batch.input_ids,
            positions=batch.positions + 1,
            digests=None,
            groups={DRAFT: step},
        )


def _own_tokens(batch: Any, requests: Sequence[Any], before: NDArray[np.int64], starts: Tensor) -> Tensor:
    """int64 [num_tokens]: of each slot its own token, by the inputs; of each request's first, by its list."""
    tokens: Tensor = batch.input_ids.to(torch.int64).roll(1)
    lists = [(request.origin_input_ids, request.output_ids) for request in requests]
    tokens[starts[:-1]] = torch.tensor(
        [
            prompt[place] if place < len(prompt) else output[place - len(prompt)]
            for (prompt, output), place in zip(lists, before.tolist(), strict=True)
        ]
    )
    return tokens
