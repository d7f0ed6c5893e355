"""KV of a request from one engine's pool to another's, region by region, one-sided: the sender says where."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from canary_obs.errors import ConfigurationError
from canary_obs.reference_engine.disaggregated.links import Link
from canary_obs.reference_engine.disaggregated.messages import Manifest, RegionMove
from canary_obs.reference_engine.engine import Engine

Slots = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Tensors that a slot's bytes of one kind lie in."""

    tensors: tuple[Tensor, ...]  # slots on the first axis, or pages and the slots of a page on the first two
    paged: bool = False

    def send(self, link: Link, slots: Tensor) -> None:
        """The bytes of slots (int64 [n]), tensor by tensor."""
        for tensor in self.tensors:
            link.send(tensor[self._places(tensor, slots)])

    def receive(self, link: Link, slots: Tensor) -> None:
        """What `send` of the same region sends, into slots (int64 [n])."""
        for tensor in self.tensors:
            shape = slots.shape[0], *tensor.shape[1 + self.paged :]
            tensor[self._places(tensor, slots)] = link.receive(shape, tensor.dtype)

    def _places(self, tensor: Tensor, slots: Tensor) -> tuple[Tensor, ...]:
        return (slots // tensor.shape[1], slots % tensor.shape[1]) if self.paged else (slots,)


class KVSender:
    """Reads an engine's pool and sends what was granted."""

    def __init__(self, engine: Engine, links: Sequence[Link]) -> None:
        _check(engine, links)
        self._engine, self._links = engine, tuple(links)

    def send(self, source: Slots, granted: Sequence[Slots]) -> None:
        """Send slots `source` [n] to the slots [n] that each link's receiver granted, then their metadata."""
        connector, pool = self._engine.connector, self._engine.runner.pool
        slots = torch.from_numpy(source).to(pool.device)
        transfer_metadata = connector.outgoing(slots, tuple(link.heads for link in self._links))
        words = 0 if transfer_metadata is None else transfer_metadata.shape[2]
        for number, (link, target) in enumerate(zip(self._links, granted, strict=True)):
            moves = tuple(self.moves(source, target))
            listed = [RegionMove(region=region, slots=write.tolist()) for region, _, write in moves]
            link.send_message(Manifest(moves=listed, words=words))
            held = regions(self._engine, link.heads)
            for region, read, _ in moves:
                held[region].send(link, torch.from_numpy(read).to(pool.device))
            if transfer_metadata is not None:
                link.send(transfer_metadata[number])

    def moves(self, source: Slots, target: Slots) -> Iterator[tuple[int, Slots, Slots]]:
        """Every copy to make: region, slots to read here, slots to write there."""
        for region in range(len(regions(self._engine, self._engine.kv_heads))):
            yield region, source, target


class KVReceiver:
    """Writes into an engine's pool what a sender sends."""

    def __init__(self, engine: Engine, links: Sequence[Link]) -> None:
        _check(engine, links)
        self._engine, self._links = engine, tuple(links)

    def receive(self, granted: Slots, kind: int) -> None:
        """Take one request's KV and metadata of this kind from every link, for the slots granted to it."""
        pool = self._engine.runner.pool
        transfer_metadata = [self._from(link, granted.size) for link in self._links]
        slots = torch.from_numpy(granted).to(pool.device)
        self._engine.connector.landed(
            slots, [share for share in transfer_metadata if share is not None], kind
        )

    def _from(self, link: Link, count: int) -> Tensor | None:
        pool = self._engine.runner.pool
        manifest = link.receive_message(Manifest)
        held = regions(self._engine, link.heads)
        for move in manifest.moves:
            held[move.region].receive(link, torch.tensor(move.slots, dtype=torch.int64, device=pool.device))
        return link.receive((count, manifest.words), torch.int64) if manifest.words else None


def regions(engine: Engine, heads: range) -> tuple[Region, ...]:
    """What belongs to a slot: each layer's KV of some global heads, then each layer's index keys."""
    pool = engine.runner.pool
    kv = tuple(Region(tensors=_held_heads(engine, layer, heads)) for layer in range(len(pool.stores)))
    if pool.index is None:
        return kv
    return kv + tuple(Region(tensors=pool.index.tensors(layer), paged=True) for layer in range(len(kv)))


def _held_heads(engine: Engine, layer: int, heads: range) -> tuple[Tensor, ...]:
    """A layer's tensors, slots first, narrowed to some of the global heads held here."""
    tensors = engine.runner.pool.stores[layer].tensors()
    if heads == engine.kv_heads:
        return tensors
    first = heads.start - engine.kv_heads.start
    return tuple(tensor.narrow(1, first, len(heads)) for tensor in tensors)


def _check(engine: Engine, links: Sequence[Link]) -> None:
    if engine.runner.pool.window is not None or engine.runner.pool.compressed:
        raise ConfigurationError(
            "disaggregated", "windows or compression", "their slots do not travel", "Use another model."
        )
    if engine.drafter is not None:
        raise ConfigurationError(
            "disaggregated", "draft_layers", "draft KV does not travel", "Use draft_layers 0."
        )
    held = engine.kv_heads
    tensors = [tensor for store in engine.runner.pool.stores for tensor in store.tensors()]
    split = any(link.heads != held for link in links)
    if split and any(tensor.dim() < 3 or tensor.shape[1] != len(held) for tensor in tensors):
        raise ConfigurationError(
            "tensor_parallel", [link.heads for link in links], "this pool's tensors have no axis of heads",
            "Give prefill and decode the same number of ranks.",
        )  # fmt: skip
