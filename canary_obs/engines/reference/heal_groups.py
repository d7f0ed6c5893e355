"""The reference engine's groups as healing sees them: which block a slot is in, and what the block is of."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

import numpy as np

from canary_obs.engines.reference.compressed_groups import StateGroup
from canary_obs.engines.reference.draft_group import DRAFT
from canary_obs.engines.reference.groups import ReferenceGroup
from canary_obs.engines.reference.swa_group import SWA
from canary_obs.reference_engine.engine import Engine
from canary_obs.reference_engine.scheduling.request import Request


class Place(Enum):
    """What a block is: a page of the pool, a window slot, or one of a row's two buffers of states."""

    PAGE = "page"
    WINDOW = "window"
    BUFFER = "buffer"


class HealGroup(NamedTuple):
    """One group. `block_tokens` = 0: its blocks hold states of an incomplete run."""

    number: int
    place: Place
    block_slots: int
    block_tokens: int
    draft: bool


def heal_groups(engine: Engine, groups: Mapping[str, ReferenceGroup]) -> dict[str, HealGroup]:
    """By name, numbered in their order."""
    page, found = engine.config.page_size, dict[str, HealGroup]()
    for number, (name, group) in enumerate(groups.items()):
        if name == SWA:
            found[name] = HealGroup(number, Place.WINDOW, 1, 1, False)
        elif isinstance(group, StateGroup):
            found[name] = HealGroup(number, Place.BUFFER, group.ratio, 0, False)
        else:
            slots = page * group.view.num_slots // engine.config.num_slots
            found[name] = HealGroup(number, Place.PAGE, slots, page, name == DRAFT)
    return found


class RequestBlocks:
    """The blocks of requests, group by group."""

    def __init__(self, engine: Engine, groups: Mapping[str, HealGroup]) -> None:
        self._groups, self._page = tuple(groups.values()), engine.config.page_size
        self._windows = engine.scheduler.windows
        # [full slots]: the window slot that each had last. A request has read it, though it may be gone.
        self._last = None if self._windows is None else self._windows.slots.of.copy()

    def note_dropped(self, full: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
        """These full slots are about to lose their window slots."""
        if self._windows is not None and self._last is not None:
            resident = full[self._windows.slots.resident(full)]
            self._last[resident] = self._windows.slots.of[resident]

    def of(self, request: Request) -> list[list[int]]:
        """By group number; -1 = none."""
        pages = (request.slots[: request.allocated : self._page] // self._page).tolist()
        buffers = [2 * request.row, 2 * request.row + 1]
        windowed = self._window_slots(request) if self._windows is not None else []
        lists = {Place.PAGE: pages, Place.WINDOW: windowed, Place.BUFFER: buffers}
        return [lists[group.place] for group in self._groups]

    def _window_slots(self, request: Request) -> list[int]:
        assert self._windows is not None
        assert self._last is not None
        full = request.slots[: request.allocated]
        own = np.where(self._windows.slots.resident(full), self._windows.slots.of[full], self._last[full])
        own[: max(0, request.shared - self._windows.slots.window + 1)] = -1  # it never saw them
        return own.tolist()  # type: ignore[no-any-return]

    def first_token(self, request: Request, group: int, block: int) -> int | None:
        """The position from which on the request may have read the block; None = it does not have it."""
        own, blocks = self._groups[group], self.of(request)[group]
        if block not in blocks:
            return None
        if own.place is Place.BUFFER:  # of the incomplete run, or of the one before
            return max(0, request.computed // own.block_slots - 1) * own.block_slots
        return blocks.index(block) * own.block_tokens
