"""One generation request and its place in the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from canary_obs.reference_engine.scheduling.oracle import TokenOracle

if TYPE_CHECKING:
    from canary_obs.reference_engine.cache.radix_cache import Node


ALL = 1 << 62  # of any number of positions


class Status(StrEnum):
    """Where a request stands."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    ABORTED = "aborted"
    FAILED = "failed"  # ended with an error


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are chosen and when to stop."""

    max_tokens: int = 16
    temperature: float = 0.0  # 0 = greedy
    seed: int = 0
    stop_at_eos: bool = True
    oracle: TokenOracle | None = None  # mock traffic: says the next token, whatever the logits are


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """A request's tokens and slots. Arrays are capacity; length, computed and allocated say what is valid."""

    id: str
    serial: int  # unique in this engine
    prompt_length: int
    sampling: Sampling
    tokens: NDArray[np.int32]  # [max_context]; prompt, then output
    slots: NDArray[np.int64]  # [max_context in whole pages]; by position
    length: int
    generator: torch.Generator | None  # None = greedy
    status: Status = Status.WAITING
    row: int = -1  # of the slot table; -1 = not running
    computed: int = 0  # positions whose KV is in the pool
    allocated: int = 0  # positions that have a slot
    shared: int = 0  # leading positions whose slots belong to the prefix cache
    window_start: int = 0  # first position that sliding windows still see
    drafted: int = 0  # positions whose draft KV is in the pool; the draft of p is computed from token p + 1
    drafts: int = 0  # proposed tokens behind `length`, for the next forward to check
    cacheable: int = ALL  # leading positions that may go to the prefix cache
    node: Node | None = field(default=None, repr=False)  # locked end of the shared prefix

    @property
    def remaining(self) -> int:
        """Tokens whose KV must still be computed."""
        return self.length - self.computed

    @property
    def output(self) -> NDArray[np.int32]:
        """The tokens generated so far."""
        return self.tokens[self.prompt_length : self.length]

    @property
    def done(self) -> bool:
        """Whether generation has ended, one way or another."""
        return self.status in (Status.FINISHED, Status.ABORTED, Status.FAILED)

    def append(self, token: int) -> None:
        """One more generated token."""
        self.tokens[self.length] = token
        self.length += 1

    def take(self, extend: int, tokens: Sequence[int]) -> None:
        """A forward over `extend` tokens is done; `tokens` were chosen: agreed proposals, then one more."""
        if not tokens:
            self.computed += extend
            return
        agreed = len(tokens) - 1
        self.computed = self.length + agreed  # the KV of refused proposals is void
        # The draft model computed all its proposals but the last.
        self.drafted += max(0, min(agreed, self.drafts - 1))
        self.drafts = 0
        for token in tokens:
            self.append(token)
