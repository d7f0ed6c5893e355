"""Slots of a window pool with memory of its own: the request table has those of the full layers."""

from __future__ import annotations

from torch import Tensor


class WindowSlots:
    """A window group's slots by those of the request table, indexed like a tensor of them."""

    def __init__(self, mapping: Tensor) -> None:
        """`mapping`: SGLang's own, int64, changed in place; its last place stands for -1, and holds it."""
        self.mapping, self._last = mapping, mapping.shape[0] - 1

    def __getitem__(self, slots: Tensor) -> Tensor:
        """int64, of the same shape; 0 = none, -1 for numbers that there are not.

        Such a number in the request table is for the checks to find: as an index it would end them, and on a
        GPU the process.
        """
        return self.mapping[slots.clamp(-1, self._last)]
