"""Which slots the allocator has taken back, and when: what was cached once may be another request's now."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from canary_obs.engines.sglang.groups import SglangGroup
from canary_obs.engines.sglang.physical_slots import PhysicalSlots
from canary_obs.engines.toolkit.method_patches import MethodPatches
from canary_obs.runtime.device.pinned_space import PinnedSpace

_BYTES = 2 << 20  # of their numbers: 64 requests of 4096 tokens
_MOST_COMING = 64  # copies of freed slots on their way to the host, before those that arrived are noted


class _Coming(NamedTuple):
    """Freed slots or pages on their way from the device."""

    clock: int
    numbers: Tensor  # pinned
    arrived: torch.Event
    kept: bool = False  # in memory that is given back


def freed_slots(groups: Iterable[SglangGroup]) -> dict[str, FreedSlots]:
    """By group; those whose slots one allocator hands out share what follows it."""
    by_allocator: dict[int, FreedSlots] = {}
    found = {}
    for group in groups:
        key = id(group.allocator)
        if key not in by_allocator:
            kind = MovingSlots if isinstance(group.own_slots, PhysicalSlots) else FreedSlots
            by_allocator[key] = kind(group.allocator, group.view.num_slots)
        found[group.view.name] = by_allocator[key]
    return found


class FreedSlots:
    """Follows the frees of one allocator of tokens, pages or states."""

    def __init__(self, allocator: Any, num_slots: int) -> None:
        self._page_size = int(getattr(allocator, "page_size", 1))  # that of states has none
        self.allocator = allocator
        # SGLang 0.5.16 frees pages by their slots.
        self._by_page = hasattr(allocator, "_release_page_ids") and self._page_size > 1
        self._clock = 0  # counts calls that free
        self._freed = np.full(-(-num_slots // self._page_size), -1, dtype=np.int64)  # clock, by page
        self._coming = deque[_Coming]()
        self._space: PinnedSpace | None = None  # where they come to
        self.total = 0  # slots taken back so far; one that waits in a group of frees may count twice

    def wrap(self, patches: MethodPatches, tree: Any) -> None:
        """Follow the allocator from now on; `patches` undoes that. `tree`: what evicts its slots."""
        self._note(slice(None))
        if self._free_pages().is_cuda:
            self._space = PinnedSpace(_BYTES, pinned=True)
        name = "_release_page_ids" if self._by_page else "free"
        # The UnifiedRadixCache of 0.5.16 evicts by a method that its component took when it was made.
        for holder in (tree, *getattr(tree, "_components_tuple", ())):
            for attribute, method in list(vars(holder).items()):
                if isinstance(method, MethodType) and method == getattr(self.allocator, name):
                    patches.set(holder, attribute, self._around_free(method))
        patches.wrap(self.allocator, name, self._around_free)
        patches.wrap(self.allocator, "clear", self._around_clear)

    def mark(self) -> int:
        """Now, for `untouched_since`."""
        return self._clock

    def noted(self) -> bool:
        """Whether `untouched_since` has nothing to wait for: all freed slots have come to the host."""
        self._note_arrived(wait=False)
        return not self._coming

    def untouched_since(self, slots: Tensor, mark: int) -> Tensor:
        """bool [n]: these slots (int64 [n], on the CPU) were not taken back since the mark.

        Waits for the device unless `noted`.
        """
        self._note_arrived(wait=True)
        return torch.from_numpy(self._freed[slots.numpy() // self._page_size] <= mark)

    def live(self) -> Tensor:
        """int64 [n]: slots that the allocator has given away and not taken back. May wait for the device."""
        used = np.ones(self._freed.size, dtype=np.bool_)
        used[self._free_pages().cpu().numpy()] = False
        used[0] = False  # takes the writes of padded tokens
        pages = np.flatnonzero(used)
        slots = pages[:, None] * self._page_size + np.arange(self._page_size)
        return torch.from_numpy(slots.reshape(-1))

    def foreign(self) -> Tensor | None:
        """int64 [n]: slots whose bytes another group may write; None = this group has its memory alone."""
        return None

    def _free_pages(self) -> Tensor:
        allocator = self.allocator
        if hasattr(allocator, "free_slots"):  # of states
            free: Tensor = allocator.free_slots
            return free
        if hasattr(allocator, "get_all_free_pages"):
            found: Tensor = allocator.get_all_free_pages()
            return found
        waiting = [slots // self._page_size for slots in allocator.free_group]
        return torch.cat([allocator.free_pages, allocator.release_pages, *waiting])

    def _note(self, pages: Any) -> None:
        self._clock += 1
        self._freed[pages] = self._clock

    def _follow(self, numbers: Tensor) -> None:
        self.total += numbers.numel() * (self._page_size if self._by_page else 1)
        if numbers.device.type == "cpu":
            self._note(self._pages(numbers))
            return
        # A free must not wait for the device, so its slots are noted when they have come.
        self._send(numbers, torch.Event(numbers.device))
        if len(self._coming) > _MOST_COMING:
            self._note_arrived(wait=False)

    def _send(self, numbers: Tensor, arrived: torch.Event) -> None:
        self._clock += 1
        place = None if self._space is None else self._space.take(numbers)
        host = place
        if host is None:
            host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=numbers.is_cuda)
        host.copy_(numbers, non_blocking=True)
        arrived.record()
        self._coming.append(_Coming(self._clock, host, arrived, kept=place is not None))

    def _note_arrived(self, *, wait: bool) -> None:
        while self._coming:
            clock, numbers, arrived, kept = self._coming[0]
            if wait:
                arrived.synchronize()
            elif not arrived.query():
                break
            self._coming.popleft()
            try:
                self._freed[self._pages(numbers)] = clock
            except IndexError:  # the engine never had it
                self._freed[:] = clock
            if kept and self._space is not None:
                self._space.give_back()

    def _pages(self, numbers: Tensor) -> Any:
        return numbers.numpy() if self._by_page else numbers.numpy() // self._page_size

    def _around_free(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def free(*given: Any, **named: Any) -> Any:
            try:
                for numbers in (*given, *named.values()):
                    self._follow(numbers)
            except Exception:  # noqa: BLE001 - what an engine frees that it never had is its own affair
                self._note(slice(None))
            return original(*given, **named)

        return free

    def _around_clear(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def clear() -> Any:
            self.total += self._freed.size * self._page_size
            self._coming.clear()
            self._note(slice(None))
            return original()

        return clear


class MovingSlots(FreedSlots):
    """Which physical slots one group has given back, or left: `UnifiedMemory` says so."""

    def __init__(self, allocator: Any, num_slots: int) -> None:
        super().__init__(allocator, num_slots)
        self.own = PhysicalSlots(allocator)

    def wrap(self, patches: MethodPatches, tree: Any) -> None:  # noqa: ARG002 - UnifiedMemory follows it
        """From now on."""
        self._note(slice(None))

    def live(self) -> Tensor:
        """int64 [n]: physical slots with a virtual number, ascending."""
        return self.own[self.own.all_virtual()].sort().values

    def foreign(self) -> Tensor:
        """int64 [n]: all that are not live."""
        free = torch.ones(self._freed.size * self._page_size, dtype=torch.bool)
        free[self.live()] = False
        return free.nonzero().flatten()

    def left(self, slots: Tensor) -> None:
        """Whole pages of these slots (int64 [n]) hold nothing any more."""
        self.total += slots.numel()
        self._note(np.unique(slots.numpy() // self._page_size))
