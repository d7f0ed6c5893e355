"""Which slots the allocator has taken back, and when: what was cached once may be another request's now."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from canary_obs.engines.toolkit.method_patches import MethodPatches


class FreedSlots:
    """Follows the frees of one token or page allocator."""

    def __init__(self, allocator: Any, num_slots: int) -> None:
        self._page_size = int(allocator.page_size)
        self._allocator = allocator
        self._clock = 0  # counts calls that free
        self._freed = np.full(-(-num_slots // self._page_size), -1, dtype=np.int64)  # clock, by page
        self.total = 0  # slots taken back so far; one that waits in a group of frees may count twice

    def wrap(self, patches: MethodPatches) -> None:
        """Follow the allocator from now on; `patches` undoes that."""
        self._note(slice(None))
        name = "free" if self._page_size == 1 else "_release_page_ids"
        patches.wrap(self._allocator, name, self._around_free)
        patches.wrap(self._allocator, "clear", self._around_clear)

    def mark(self) -> int:
        """Now, for `untouched_since`."""
        return self._clock

    def untouched_since(self, slots: Tensor, mark: int) -> Tensor:
        """bool [n]: these slots (int64 [n], on the CPU) were not taken back since the mark."""
        return torch.from_numpy(self._freed[slots.numpy() // self._page_size] <= mark)

    def live(self) -> Tensor:
        """int64 [n]: slots that the allocator has given away and not taken back."""
        free = self._allocator.get_all_free_pages().cpu().numpy()
        used = np.ones(self._freed.size, dtype=np.bool_)
        used[free] = False
        used[0] = False  # takes the writes of padded tokens
        pages = np.flatnonzero(used)
        slots = pages[:, None] * self._page_size + np.arange(self._page_size)
        return torch.from_numpy(slots.reshape(-1))

    def _note(self, pages: Any) -> None:
        self._clock += 1
        self._freed[pages] = self._clock

    def _around_free(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def free(*given: Any, **named: Any) -> Any:
            try:
                for pages in (*given, *named.values()):
                    self._note(pages.numpy())
                    self.total += pages.numel() * self._page_size
            except Exception:  # noqa: BLE001 - what an engine frees that it never had is its own affair
                self._note(slice(None))
            return original(*given, **named)

        return free

    def _around_clear(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def clear() -> Any:
            self.total += self._freed.size * self._page_size
            self._note(slice(None))
            return original()

        return clear
