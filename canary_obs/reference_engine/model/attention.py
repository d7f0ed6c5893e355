"""What a layer's attention is given and returns, whichever variant it is."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from canary_obs.reference_engine.model.rotary import Rotation
from canary_obs.reference_engine.model.sparse import Pick


class Attend(Protocol):
    """Stores the new keys and values of a layer and attends over everything the tokens may see."""

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, pick: Pick | None = None
    ) -> Tensor:
        """query [tokens, heads, dim], key [tokens, kv_heads, dim], value [tokens, kv_heads, value dim].

        Returns [tokens, heads * value dim]. `pick`: attend to no more than this chooses.
        """


class Attention(Protocol):
    """A layer's attention with its projections."""

    def __call__(self, layer: int, normed: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """[tokens, hidden] of the normed input [tokens, hidden]."""
