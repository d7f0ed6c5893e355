"""What belongs to a request's tokens in an engine's pools, by the numbering of its slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from canary_obs.errors import ConfigurationError
from canary_obs.reference_engine.cache.connector import FULL_SLOTS, WINDOW_SLOTS, entry_slots
from canary_obs.reference_engine.cache.storage import LayerStore
from canary_obs.reference_engine.disaggregated.links import Link
from canary_obs.reference_engine.engine import Engine

Slots = NDArray[np.int64]
Places = dict[str, Slots]  # by numbering; of the same tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Tensors that a slot's bytes of one kind lie in."""

    numbering: str
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


def regions(engine: Engine, heads: range) -> tuple[Region, ...]:
    """All that travels of some global heads: KV of layers and drafts, index keys, window layers, entries.

    States of incomplete runs do not: a prefix that is sent ends with a page, and so with a run.
    """
    pool = engine.runner.pool
    sees_all = engine.runner.model.shape.sees_all
    kept = [store for layer, store in enumerate(pool.stores) if sees_all(layer)]
    if engine.drafter is not None:
        kept += engine.drafter.runner.pool.stores
    found = _of_heads(engine, FULL_SLOTS, kept, heads)
    if pool.index is not None:
        layers = range(len(pool.stores))
        found += [
            Region(numbering=FULL_SLOTS, tensors=pool.index.tensors(layer), paged=True) for layer in layers
        ]
    if pool.window is not None:
        found += _of_heads(engine, WINDOW_SLOTS, tuple(pool.window.stores.values()), heads)
    for compressed in pool.compressed:
        numbering = entry_slots(compressed.ratio)
        for layer in range(len(compressed.layers)):
            rows = (compressed.entries.rows[layer],)
            found.append(Region(numbering=numbering, tensors=rows, paged=True))
            if (index := compressed.index) is not None:
                found.append(Region(numbering=numbering, tensors=index.tensors(layer), paged=True))
    return tuple(found)


def places(engine: Engine, full: Slots, windowed: Slots) -> Places:
    """Slots of tokens in every numbering, from their full slots (whole pages) and their window slots."""
    pool = engine.runner.pool
    found = {FULL_SLOTS: full}
    if pool.window is not None:
        found[WINDOW_SLOTS] = windowed
    for compressed in pool.compressed:
        ratio = compressed.ratio
        found[entry_slots(ratio)] = full[ratio - 1 :: ratio] // ratio
    return found


def check_links(engine: Engine, links: Sequence[Link]) -> None:
    """Raises ConfigurationError where some of the KV cannot be sent as these links divide it."""
    held, pool = engine.kv_heads, engine.runner.pool
    if engine.shard is not None and engine.drafter is not None:
        raise ConfigurationError(
            "draft_layers", engine.config.draft_layers, "a draft model is not divided among ranks",
            "Use one rank, or draft_layers 0.",
        )  # fmt: skip
    if all(link.heads == held for link in links):
        return
    tensors = [tensor for store in pool.stores for tensor in store.tensors()]
    whole = pool.compressed or any(tensor.dim() < 3 or tensor.shape[1] != len(held) for tensor in tensors)
    if whole:
        raise ConfigurationError(
            "tensor_parallel", [link.heads for link in links], "this pool's tensors have no axis of heads",
            "Give prefill and decode the same number of ranks.",
        )  # fmt: skip


def _of_heads(engine: Engine, numbering: str, stores: Sequence[LayerStore], heads: range) -> list[Region]:
    """Each layer's tensors, slots first, narrowed to some of the global heads held here."""
    found = [store.tensors() for store in stores]
    if heads != engine.kv_heads:
        first = heads.start - engine.kv_heads.start
        found = [tuple(tensor.narrow(1, first, len(heads)) for tensor in own) for own in found]
    return [Region(numbering=numbering, tensors=own) for own in found]
