"""A toy engine with a paged KV cache, as small as an engine can be; `own_engine.py` protects it."""

from __future__ import annotations

import torch
from torch import Tensor

PAGE_SIZE = 4


class ToyEngine:
    """Two requests, one layer, no attention. It does not import the canary."""

    def __init__(self) -> None:
        self.kv = torch.zeros(2, 16, PAGE_SIZE, 2, 8)  # [K and V, pages, PAGE_SIZE, heads, head_dim]
        self.block_table = torch.arange(16).view(2, 8)  # int64 [requests, pages of a request]
        self.tokens = [[11, 12, 13, 14, 15], [21, 22]]  # by request: prompt, then output
        self.computed = [0, 0]  # by request: tokens that have KV
        self.steps = 0

    def slots_of(self, requests: Tensor, positions: Tensor) -> Tensor:
        """int64 [n]: where the KV of each (request, position) is."""
        return self.block_table[requests, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE

    def step(self) -> None:
        """Compute the KV of every token that has none, then append a token to each request."""
        self.steps += 1
        new = [(i, p) for i, ids in enumerate(self.tokens) for p in range(self.computed[i], len(ids))]
        requests, positions = torch.tensor(new).unbind(1)
        token_ids = torch.tensor([self.tokens[i][p] for i, p in new])
        self.forward(token_ids, positions, self.slots_of(requests, positions))
        for request, ids in enumerate(self.tokens):
            self.computed[request] = len(ids)
            ids.append(sum(ids) % 97)

    def forward(self, token_ids: Tensor, positions: Tensor, slots: Tensor) -> None:
        """Write K and V of the new tokens (int64 [num_tokens] each) into their slots."""
        rows = (token_ids + positions / 64).view(-1, 1, 1)
        self.kv[0].flatten(0, 1)[slots] = rows
        self.kv[1].flatten(0, 1)[slots] = -rows
