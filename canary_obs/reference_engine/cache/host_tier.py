"""KV of evicted prefixes in host memory: a page leaves the device by `offload` and comes back by `load`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from canary_obs.reference_engine.cache.storage import LayerStore

Tokens = NDArray[np.signedinteger[Any]]
Slots = NDArray[np.int64]
KEY_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class HostPage:
    """One page of one prefix. `bytes` holds, by tensor of the pool, [page_size, ...] on the CPU."""

    key: bytes
    bytes: tuple[Tensor, ...]


class HostTier:
    """Least recently used pages go when it is full. Keys cover every token up to a page's end."""

    def __init__(self, stores: Sequence[LayerStore], page_size: int, capacity: int) -> None:
        self._stores, self._page_size, self._capacity = tuple(stores), page_size, capacity
        self._pages: OrderedDict[bytes, HostPage] = OrderedDict()
        self.offloaded = self.loaded = 0  # pages, since the engine started

    def __len__(self) -> int:
        return len(self._pages)

    def offload(self, tokens: Tokens, slots: Slots) -> tuple[HostPage, ...]:
        """Copy the slots of the last pages of a prefix (tokens from position 0) to the host."""
        page, kept = self._page_size, []
        first = tokens.size - slots.size
        for start in range(0, slots.size, page):
            key = prefix_key(tokens[: first + start + page])
            places = torch.from_numpy(slots[start : start + page])
            held = HostPage(key=key, bytes=tuple(self._copied_out(places)))
            self._pages[key] = held
            self._pages.move_to_end(key)
            kept.append(held)
        while len(self._pages) > self._capacity:
            self._pages.popitem(last=False)
        self.offloaded += len(kept)
        return tuple(kept)

    def find(self, tokens: Tokens, start: int) -> tuple[HostPage, ...]:
        """The held pages that continue a prefix from position `start`, in order."""
        found = []
        for end in range(start + self._page_size, tokens.size + 1, self._page_size):
            held = self._pages.get(prefix_key(tokens[:end]))
            if held is None:
                break
            self._pages.move_to_end(held.key)
            found.append(held)
        return tuple(found)

    def holds(self, key: bytes) -> bool:
        """Whether the page of this prefix is here."""
        return key in self._pages

    def drop(self, key: bytes) -> None:
        """Forget the page of this prefix."""
        self._pages.pop(key, None)

    def load(self, pages: Sequence[HostPage], slots: Slots) -> None:
        """Write pages into slots [len(pages) * page_size]."""
        places = torch.from_numpy(slots)
        for number, tensor in enumerate(self._tensors()):
            arriving = torch.cat([page.bytes[number] for page in pages])
            # As bytes: index_copy_ does not know every storage type.
            target = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
            target.index_copy_(0, places.to(tensor.device), arriving.view(target.dtype).to(tensor.device))
        self.loaded += len(pages)

    @property
    def keys(self) -> list[bytes]:
        """Of all pages, least recently used first."""
        return list(self._pages)

    @property
    def capacity(self) -> int:
        """The most pages that it holds."""
        return self._capacity

    def _tensors(self) -> list[Tensor]:
        return [tensor for store in self._stores for tensor in store.tensors()]

    def _copied_out(self, places: Tensor) -> list[Tensor]:
        return [tensor[places.to(tensor.device)].cpu() for tensor in self._tensors()]


def prefix_key(tokens: Tokens) -> bytes:
    """16 bytes that stand for these tokens, from position 0 on."""
    return blake2b(tokens.tobytes(), digest_size=KEY_BYTES).digest()
