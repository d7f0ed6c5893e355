"""Attention over compressed entries: each run of `ratio` tokens is pooled into one row that stands for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as functional
from torch import Tensor

from canary_obs.reference_engine.model.rotary import Rotary, rotate

if TYPE_CHECKING:
    from canary_obs.reference_engine.model.shapes import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What the tokens of a batch ask of a layer's entries."""

    query: Tensor  # [tokens, heads, entry]
    index_query: Tensor | None  # [tokens, index_heads, rope]; None = no indexer, every entry is read
    index_weights: Tensor | None  # [tokens, index_heads]

    def of(self, tokens: slice) -> Question:
        """The part of some tokens."""
        query, weights = self.index_query, self.index_weights
        return Question(
            query=self.query[tokens],
            index_query=None if query is None else query[tokens],
            index_weights=None if weights is None else weights[tokens],
        )


class Compress(Protocol):
    """Stores the states of a layer's new tokens, completes runs, and attends over entries."""

    def __call__(self, layer: int, states: Tensor, question: Question) -> Tensor:
        """states [tokens, state size] -> [tokens, heads, rank]."""


class CompressedAttention:
    """One layer's projections. Entries serve as keys; their part without rotation serves as values."""

    def __init__(self, shape: ModelShape, weights: dict[str, Tensor], rotary: Rotary) -> None:
        assert shape.compressed is not None
        self._sizes, self._rotary = shape.compressed, rotary
        self._query, self._state, self._output = (weights[f"{name}_proj"] for name in ("q", "state", "o"))
        self._place_bias = weights["place_bias"][:, 0]  # [ratio]
        self._index_query, self._index_weights = weights.get("index_q_proj"), weights.get("index_w_proj")

    def __call__(self, layer: int, normed: Tensor, positions: Tensor, compress: Compress) -> Tensor:
        """[tokens, hidden] of the normed input [tokens, hidden]."""
        sizes, rotation = self._sizes, self._rotary.at(positions)
        query = functional.linear(normed, self._query).view(-1, sizes.heads, sizes.entry)
        index_query = self._indexed(normed, self._index_query, (sizes.index_heads, sizes.rope))
        question = Question(
            query=torch.cat([query[..., : sizes.rank], rotate(query[..., sizes.rank :], rotation)], dim=-1),
            index_query=None if index_query is None else rotate(index_query, rotation),
            index_weights=self._indexed(normed, self._index_weights, (sizes.index_heads,)),
        )
        states = functional.linear(normed, self._state)
        states[:, -1] += self._place_bias[positions % self._place_bias.shape[0]]
        mixed = compress(layer, states, question)
        return functional.linear(mixed.flatten(1), self._output)

    def _indexed(self, normed: Tensor, weight: Tensor | None, size: tuple[int, ...]) -> Tensor | None:
        return None if weight is None else functional.linear(normed, weight).view(-1, *size)


def pooled(states: Tensor) -> Tensor:
    """[runs, state size - 1]: the tokens of each run [runs, ratio, state size], weighted by their gates."""
    weights = states[..., -1].softmax(-1)
    return torch.einsum("nr,nrd->nd", weights, states[..., :-1])


def chosen_entries(question: Question, keys: Tensor, visible: Tensor, top_k: int) -> Tensor:
    """bool [tokens, entries]: of the visible ones, those that the indexer scores highest."""
    assert question.index_query is not None
    assert question.index_weights is not None
    scores = torch.einsum("thd,ed->the", question.index_query, keys)
    return highest(scores, question.index_weights, visible, top_k)


def highest(scores: Tensor, weights: Tensor, visible: Tensor, top_k: int) -> Tensor:
    """bool [tokens, n]: the best that are visible. scores [tokens, heads, n], weights [tokens, heads]."""
    # DeepSeek has relu here; with few heads that leaves ties, which topk breaks as it likes.
    ranked = torch.einsum("the,th->te", functional.silu(scores), weights)
    best = ranked.masked_fill(~visible, -torch.inf).topk(min(top_k, scores.shape[2]), dim=-1).indices
    return torch.zeros_like(visible).scatter_(1, best, value=True) & visible


def attend_entries(query: Tensor, entries: Tensor, seen: Tensor, rank: int) -> Tensor:
    """[tokens, heads, rank]: query [tokens, heads, entry] over entries [n, entry]; seen bool [tokens, n]."""
    scores = torch.einsum("thd,ed->the", query, entries) * query.shape[-1] ** -0.5
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    # A sink of score 0: a token that sees no entry then gets 0, not NaN.
    sink = scores.new_zeros((*scores.shape[:2], 1))
    weights = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
    return torch.einsum("the,ed->thd", weights, entries[:, :rank])
