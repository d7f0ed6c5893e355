"""Faults at random moments in a reference engine: bytes, slot table entries, the cache's mapping."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from canary_obs.reference_engine.engine import Engine

_TABLE_STEPS, _MAPPING_STEPS = 3, 8  # so long an entry stays wrong, at most


class Planted(NamedTuple):
    """A damaged place."""

    step: int
    group: str
    slot: int


class Faults:
    """Draws one of all kinds; what changes the engine's tables is undone after some steps."""

    def __init__(self, engine: Engine, adapter: Any, seed: int) -> None:
        self._engine, self._adapter, self._draw = engine, adapter, random.Random(seed)
        self._views = {view.name: view for view in adapter.groups}
        self._undo: list[tuple[int, Callable[[], None]]] = []  # step, and what to do then
        self.planted: Counter[str] = Counter()
        self.places: list[Planted] = []
        self.kinds: dict[str, Callable[[int], bool]] = {
            "idle block, one word": lambda step: self._bytes(step, idle=True, whole=False),
            "idle block, whole": lambda step: self._bytes(step, idle=True, whole=True),
            "used block, one word": lambda step: self._bytes(step, idle=False, whole=False),
            "used block, whole": lambda step: self._bytes(step, idle=False, whole=True),
            "wrong table entry": self._table,
        }
        if engine.scheduler.windows is None:  # which locks slots by their numbers
            self.kinds["wrong cached mapping"] = self._mapping

    def plant(self, step: int) -> None:
        """One fault; a kind that finds no place now is another one's turn."""
        for kind in self._draw.sample(sorted(self.kinds), len(self.kinds)):
            if self.kinds[kind](step):
                self.planted[kind] += 1
                return

    def settle(self, step: int | None) -> None:
        """Undo what is due; None = everything."""
        due = [undo for at, undo in self._undo if step is None or at <= step]
        self._undo = [] if step is None else [(at, undo) for at, undo in self._undo if at > step]
        for undo in due:
            undo()

    def _bytes(self, step: int, *, idle: bool, whole: bool) -> bool:
        view = self._views[self._draw.choice(sorted(self._views))]
        cached = self._adapter.prefix_cache.cached(view.name, unlocked_only=True).slots.tolist()
        found = cached if idle else sorted({*self._adapter.slots_in_use(view.name).tolist()} - {*cached})
        if not found:
            return False
        slot, draw = self._draw.choice(found), self._draw
        tensor = draw.choice(view.sources).tensor
        paged = tensor.shape[0] != view.num_slots
        content = tensor[divmod(slot, tensor.shape[1])] if paged else tensor[slot]
        raw = content.view(torch.uint8).view(-1)
        size = raw.numel() if whole else min(4, raw.numel())
        first = draw.randrange(raw.numel() // size) * size
        flips = torch.tensor([draw.randrange(1, 256) for _ in range(size)], dtype=torch.uint8)
        raw[first : first + size] ^= flips
        self.places.append(Planted(step, view.name, slot))
        return True

    def _table(self, step: int) -> bool:
        """An entry of a running request points to another slot, for some steps or until it ends."""
        engine, draw = self._engine, self._draw
        table, page = engine.runner.pool.req_to_token, engine.config.page_size
        windows = engine.scheduler.windows
        # An engine that reads a window slot that is not there crashes: layers with windows do not see these.
        unseen = lambda one: one.computed if windows is None else one.window_start  # noqa: E731
        running = [request for request in engine.scheduler.running if unseen(request) >= page]
        if not running:
            return False
        request = draw.choice(running)
        row, serial, first = request.row, request.serial, draw.randrange(unseen(request) // page) * page
        wrong = draw.randrange(engine.config.num_slots // page) * page
        right = int(table[row, first])
        if wrong == right:
            return False
        places = slice(first, first + page)
        table[row, places] = torch.arange(wrong, wrong + page, dtype=table.dtype)

        def undo() -> None:
            owners = [one for one in engine.scheduler.running if (one.row, one.serial) == (row, serial)]
            # A request that has started again may own the other page by now.
            mine = [one for one in owners if int(one.slots[first]) == right]
            if mine and int(table[row, first]) == wrong:
                table[row, places] = torch.arange(right, right + page, dtype=table.dtype)

        self._undo.append((step + draw.randint(1, _TABLE_STEPS), undo))
        return True

    def _mapping(self, step: int) -> bool:
        """The cache finds a page by the tokens of another one, for some steps."""
        cache, page = self._engine.scheduler.cache, self._engine.config.page_size
        pages = np.unique(cache.held() // page).tolist()
        if len(pages) < 2 or "match" in vars(cache):
            return False
        first, second = self._draw.sample(pages, 2)
        match = cache.match

        def wrong(tokens: Any) -> Any:
            slots, node = match(tokens)
            (found,) = np.flatnonzero(slots[::page] == first * page)[:1].tolist() or (None,)
            if found is not None:
                slots = slots.copy()
                slots[found * page : (found + 1) * page] = np.arange(second * page, (second + 1) * page)
            return slots, node

        cache.match = wrong  # type: ignore[method-assign]
        self._undo.append(
            (step + self._draw.randint(2, _MAPPING_STEPS), lambda: vars(cache).pop("match", None))
        )
        return True
