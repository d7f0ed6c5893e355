"""One rank's share of a model: some of its heads, their part of every projection, sums over the ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from canary_obs.errors import ConfigurationError
from canary_obs.reference_engine.model.shapes import ModelShape

_BY_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_BY_COLUMNS = ("o_proj", "down_proj")


def heads_of(kv_heads: int, rank: int, size: int) -> range:
    """Global KV heads of a rank. Raises ConfigurationError unless the ranks get equal shares."""
    if not 0 <= rank < size or kv_heads % size:
        raise ConfigurationError(
            "tensor_parallel", f"rank {rank} of {size}", f"{kv_heads} KV heads do not split evenly",
            "Use a number of ranks that divides the KV heads.",
        )  # fmt: skip
    share = kv_heads // size
    return range(rank * share, (rank + 1) * share)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A tensor-parallel rank. All ranks of an engine are given the same requests and step together."""

    rank: int
    size: int
    all_reduce: Callable[[Tensor], Tensor]  # the sum of a partial result over all ranks

    def shape(self, whole: ModelShape) -> ModelShape:
        """What of the model this rank holds."""
        if whole.latent is not None or whole.compressed is not None:
            raise ConfigurationError(
                "tensor_parallel",
                self.size,
                "latent rows and compressed entries have no heads to split",
                "Use one rank for this model.",
            )
        heads_of(whole.kv_heads, self.rank, self.size)
        return replace(
            whole,
            heads=whole.heads // self.size,
            kv_heads=whole.kv_heads // self.size,
            intermediate=whole.intermediate // self.size,
        )

    def weights(self, whole: dict[str, Tensor]) -> dict[str, Tensor]:
        """This rank's slices, by name."""
        return {name: self._slice(name, weight) for name, weight in whole.items()}

    def _slice(self, name: str, weight: Tensor) -> Tensor:
        if any(part in name for part in _BY_ROWS):
            return weight.chunk(self.size, dim=0)[self.rank]
        if any(part in name for part in _BY_COLUMNS):
            return weight.chunk(self.size, dim=1)[self.rank]
        return weight
