"""Unified memory: one buffer whose bytes window and full layers use in turn, slots that move within it.

The request table names slots by virtual numbers, which they keep. Groups here are of physical slots, where
the bytes are, and what SGLang moves from one to another is announced as a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from canary_obs.engine_api.observer import Observer
from canary_obs.engines.sglang.freed_slots import FreedSlots, MovingSlots
from canary_obs.engines.toolkit.block_slots import give_up
from canary_obs.engines.toolkit.guarded import guarded
from canary_obs.engines.toolkit.method_patches import MethodPatches


class UnifiedMemory:
    """Announces what a unified pool's allocators do between forwards; on a CPU."""

    def __init__(self, pools: Mapping[str, Any], freed: Mapping[str, FreedSlots], observer: Observer) -> None:
        """`pools` and `freed`: by group; the allocators are those that `freed` follows."""
        self._pools, self._observer = pools, observer
        self._freed = {name: each for name, each in freed.items() if isinstance(each, MovingSlots)}

    def wrap(self, patches: MethodPatches) -> None:
        """From now on; `patches` undoes that."""
        for name, freed in self._freed.items():
            patches.wrap(freed.allocator, "free", self._around_free(name, freed))
            patches.wrap(freed.allocator, "clear", self._around_clear(name, freed))
            patches.wrap(self._pools[name], "move_physical_pages", self._around_move(name, freed))

    def _around_free(self, name: str, freed: MovingSlots) -> Callable[..., Any]:
        allocator = freed.allocator

        def around(original: Callable[..., Any]) -> Callable[..., Any]:
            def free(free_index: Any, *given: Any, **named: Any) -> Any:
                # Those of a group of frees are freed by a call of their own.
                if free_index is not None and free_index.numel() and allocator.free_group is None:
                    self._announce(self._give_up, name, freed, free_index)
                return original(free_index, *given, **named)

            return free

        return around

    def _around_clear(self, name: str, freed: MovingSlots) -> Callable[..., Any]:
        def around(original: Callable[..., Any]) -> Callable[..., Any]:
            def clear() -> Any:
                self._announce(self._give_up, name, freed, None)
                return original()

            return clear

        return around

    def _give_up(self, name: str, freed: MovingSlots, virtual: Tensor | None) -> None:
        """Their pages, None = all, are free: the other group may have the bytes at any time."""
        if virtual is None:
            slots = freed.live()
        else:
            size = int(freed.allocator.page_size)
            pages = torch.unique(virtual.detach().to(torch.int64) // size)
            slots = freed.own[_slots(pages, size)]
            slots = slots[slots > 0]
        if slots.numel():
            freed.left(slots)
            give_up(self._observer, name, slots)

    def _around_move(self, name: str, freed: MovingSlots) -> Callable[..., Any]:
        def around(original: Callable[..., Any]) -> Callable[..., Any]:
            def move_physical_pages(tgt_pages: Tensor, src_pages: Tensor, page_size: int) -> Any:
                result = original(tgt_pages, src_pages, page_size)
                self._announce(self._moved, name, freed, src_pages, tgt_pages)
                return result

            return move_physical_pages

        return around

    def _moved(self, name: str, freed: MovingSlots, source: Tensor, destination: Tensor) -> None:
        size = int(freed.allocator.page_size)
        left = _slots(source, size)
        self._observer.copied(name, left, _slots(destination, size))
        self._observer.invalidated(name, left)
        freed.left(left)

    def _announce(self, act: Callable[..., None], *given: object) -> None:
        guarded(self._observer, "announce", act, *given)


def _slots(pages: Tensor, page_size: int) -> Tensor:
    """int64 [n]: the slots of pages."""
    return (pages.to(torch.int64)[:, None] * page_size + torch.arange(page_size)).flatten()
