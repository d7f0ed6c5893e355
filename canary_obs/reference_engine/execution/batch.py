"""One forward of the engine: the flat batch, and what attention reads of it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from canary_obs.reference_engine.execution.runs import RunBatch
from canary_obs.reference_engine.scheduling.request import Request


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
    window_slots: Tensor | None  # int64 [num_tokens]; out_slots of the sliding-window layers
    runs: tuple[RunBatch, ...]  # one per ratio of compressed layers
    scores: tuple[int, ...]  # of each request: how many of its last tokens are scored
    scored: Tensor  # int64 [sum of scores]; their places in the flat batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Padded:
    """The requests that add one token each, attended together."""

    tokens: Tensor  # int64 [n]; their places in the flat batch
    slots: Tensor  # int64 [n * width]; own first slot beyond the length
    mask: Tensor  # bool [n, width]; True = attend
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A request that adds several tokens."""

    start: int  # place of its first token in the flat batch
    stop: int
    slots: Tensor  # int64 [length]
    mask: Tensor  # bool [stop - start, length]; causal, within the window


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMetadata:
    """Where a batch's tokens are stored in one group of layers, and which slots they attend to."""

    out_slots: Tensor  # int64 [num_tokens]
    padded: Padded | None
    chunks: list[Chunk]
