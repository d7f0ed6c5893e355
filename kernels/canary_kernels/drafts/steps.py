"""What the drafts operation reads and keeps: a target's step, and copies of its inputs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftReserve:
    """How many slots after a request's tokens drafting may write."""

    ahead: int  # slots
    limit: int  # positions from here on are not written: the last one before is, instead
    page_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftMemory:
    """Copies of a target's inputs. Allocated once; the step under way has the first places of each."""

    prefix_lens: Tensor  # [max_requests]
    extend_lens: Tensor  # [max_requests]
    token_starts: Tensor  # [max_requests + 1]
    input_ids: Tensor  # [max_tokens]
    positions: Tensor  # [max_tokens]
    slots: Tensor  # int64 [max_tokens + max_requests * ahead]; the target's, then the drafts'
    reserve: DraftReserve
    cache: dict[Any, Any] = field(init=False, repr=False, compare=False, default_factory=dict)

    @classmethod
    def allocate(
        cls,
        requests: int,
        tokens: int,
        reserve: DraftReserve,
        kinds: tuple[torch.dtype, ...],
        device: torch.device,
    ) -> DraftMemory:
        """For at most so many. `kinds`: integer types of lengths, input ids and positions."""
        length, token, place = kinds
        return cls(
            prefix_lens=torch.empty(requests, dtype=length, device=device),
            extend_lens=torch.empty(requests, dtype=length, device=device),
            token_starts=torch.empty(requests + 1, dtype=length, device=device),
            input_ids=torch.empty(tokens, dtype=token, device=device),
            positions=torch.empty(tokens, dtype=place, device=device),
            slots=torch.empty(tokens + requests * reserve.ahead, dtype=torch.int64, device=device),
            reserve=reserve,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetStep:
    """A target's forward, as the group of its draft sees it. Integers."""

    prefix_lens: Tensor  # [num_requests]
    extend_lens: Tensor  # [num_requests]
    token_starts: Tensor  # [num_requests + 1]
    input_ids: Tensor  # [num_tokens]
    positions: Tensor  # [num_tokens]
    slot_table: Tensor  # [>= num_requests, width]; row i is request i's; page numbers when page_size > 1
    out_slots: Tensor  # [num_tokens]; -1 = skip
