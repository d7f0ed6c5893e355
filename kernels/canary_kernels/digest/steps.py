"""What the digest operations read and keep: a step's token ids, and the chains of all requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

GoOn = Callable[[Sequence[int], Sequence[int]], bool]  # of `one_by_one`


@dataclass(frozen=True, slots=True, kw_only=True)
class DigestMemory:
    """One row per request that an engine can hold. Allocated once; steps on one stream share the results."""

    chains: Tensor  # int64 [max_requests]; chain over the first counts[row] tokens
    counts: Tensor  # int64 [max_requests]; 0 = start from the anchor
    digests: Tensor  # int64 [max_requests]; result of a step, by place in the batch
    prefix_lens: Tensor  # int32 [max_requests]; likewise
    extend_lens: Tensor  # int32 [max_requests]; likewise
    tails: Tensor  # int32 [max_requests, width]; fed last, of which the engine may yet reject some
    cache: dict[Any, Any] = field(init=False, repr=False, compare=False, default_factory=dict)

    @classmethod
    def allocate(cls, max_requests: int, device: torch.device, tail: int = 0) -> DigestMemory:
        """Zeroed. `tail`: tokens that the engine may reject of what it feeds a request in one step."""
        kinds = torch.int64, torch.int64, torch.int64, torch.int32, torch.int32
        names = "chains", "counts", "digests", "prefix_lens", "extend_lens"
        columns = (torch.zeros(max_requests, dtype=kind, device=device) for kind in kinds)
        tails = torch.zeros((max_requests, tail), dtype=torch.int32, device=device)
        return cls(tails=tails, **dict(zip(names, columns, strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLists:
    """A step of an engine that keeps every request's tokens on the device. Integers."""

    rows: Tensor  # [num_requests]; row of the lists
    tokens: Tensor  # [max_requests, width]; the engine's own token lists
    computed: Tensor  # [max_requests]; tokens in the cache before this forward, by row
    token_starts: Tensor  # [num_requests + 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class InputTokens:
    """A step of an engine that has only the forward's inputs on the device. Integers."""

    places: Tensor  # int64 [3, num_requests]: row; 1 = the chain starts over; where it starts then
    input_ids: Tensor  # [num_tokens]
    token_starts: Tensor  # [num_requests + 1]
    prefix_lens: Tensor  # [num_requests]
