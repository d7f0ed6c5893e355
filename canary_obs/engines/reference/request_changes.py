"""Shows which requests hold which slots: as they begin and end, and before a finding is followed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from canary_obs.engine_api.adapter import EngineAdapter
from canary_obs.engine_api.observer import Observer
from canary_obs.engine_api.requests import (
    AddedBlocks,
    BlockTable,
    ChangedRequests,
    KeyedBlocks,
    RequestChange,
)
from canary_obs.engines.reference.compressed_groups import EntryGroup, StateGroup
from canary_obs.engines.reference.swa_group import SwaGroup
from canary_obs.engines.toolkit.method_patches import MethodPatches
from canary_obs.reference_engine.cache.window_slots import Slots
from canary_obs.reference_engine.engine import Engine
from canary_obs.reference_engine.execution.batch import ForwardBatch
from canary_obs.reference_engine.scheduling.request import Request, Status
from canary_obs.slot_facts import request_name

_SLOTS, _WINDOW = "slots", "window"  # numberings: of positions, and of their window slots


class RequestChanges:
    """A step in which nobody begins or ends shows nothing: slots that requests get are shown later."""

    def __init__(self, engine: Engine, groups: Mapping[str, object]) -> None:
        self._engine = engine
        self.tables = {name: _table(group, engine) for name, group in groups.items()}
        # Numberings of compressed entries, by their ratios, and of rows of states.
        self._ratios = {
            group.numbering: group.ratio for group in groups.values() if isinstance(group, EntryGroup)
        }
        self._rows = [name for name, group in groups.items() if isinstance(group, StateGroup)]
        self._shown: dict[int, int] = {}  # by serial of a request that runs: how many of its slots
        self._windows_shown: dict[int, int] = {}  # ... and the first position whose window slot was not
        self._computed: dict[int, int] = {}  # ... and the positions that it had computed then
        self._ending: int | None = None  # serial of a request whose release is under way

    @property
    def running(self) -> int:
        """Requests that run now."""
        return len(self._engine.scheduler.running)

    def wrap(self, patches: MethodPatches, observer: Observer) -> None:
        """Follow who ends: from then on others may get its slots."""

        def make(release: Callable[[Request, Status], None]) -> Callable[..., None]:
            def observed(request: Request, status: Status) -> None:
                self._end(request, observer)
                self._ending = request.serial  # it runs until its slots are given back
                try:
                    release(request, status)
                finally:
                    self._ending = None

            return observed

        patches.wrap(self._engine.scheduler, "release", make)
        if self._engine.scheduler.windows is not None:
            patches.wrap(
                self._engine.scheduler.windows.slots, "drop", lambda drop: self._around_drop(drop, observer)
            )

    def _around_drop(self, drop: Callable[[Slots], int], observer: Observer) -> Callable[[Slots], int]:
        """Others may get a window slot in the same step that a request leaves it."""

        def observed(full: Slots) -> int:
            if full.size:
                self.show(observer)
            return drop(full)

        return observed

    def before(self, forward: Callable[[ForwardBatch], Any], observer: Observer) -> Callable[..., Any]:
        """A forward that shows who begins with it."""

        def observed(batch: ForwardBatch) -> Any:
            if len(self._shown) != len(self._engine.scheduler.running):
                self.show(observer)
            return forward(batch)

        return observed

    def show(self, observer: Observer) -> None:
        """Everything that was not shown."""
        try:
            rewrites = self._engine.drafter is not None
            if changed := tuple(self._changes()):
                observer.requests_changed(ChangedRequests(changed=changed, rewrites=rewrites, late=True))
        except Exception as error:  # noqa: BLE001 - a fault of the canary must not reach the engine
            observer.fault("announce", error)

    def show_stored(self, keys: Sequence[bytes], slots: Slots, observer: Observer) -> None:
        """The host tier has copies of these slots."""
        self.show(observer)
        observer.requests_changed(ChangedRequests(stored={_SLOTS: KeyedBlocks(keys, slots)}))

    def show_loaded(self, keys: Sequence[bytes], slots: Slots, observer: Observer) -> None:
        """These slots have copies from the host tier."""
        self.show(observer)
        observer.requests_changed(ChangedRequests(loaded={_SLOTS: KeyedBlocks(keys, slots)}))

    def _end(self, request: Request, observer: Observer) -> None:
        self.show(observer)
        self._windows_shown.pop(request.serial, None)
        self._computed.pop(request.serial, None)
        if self._shown.pop(request.serial, None) is not None:
            observer.requests_changed(ChangedRequests(ended={request.id: _emitted(request)}))

    def _changes(self) -> Iterator[RequestChange]:
        for request in self._engine.scheduler.running:
            if request.serial == self._ending:
                continue
            shown = self._shown.get(request.serial)
            first = shown or 0
            joined = request.shared if shown is None else 0
            # What is added may be held since the last time, when not all that had slots was computed.
            computed = self._computed.get(request.serial, joined)
            self._computed[request.serial] = request.computed
            added = dict(self._added(request, first, joined))
            if shown is None and self._rows:
                added |= dict.fromkeys(self._rows, AddedBlocks(np.array([request.row]), 0, 0))
            self._shown[request.serial] = request.allocated
            if added or shown is None:
                yield RequestChange(
                    request=request.id, begins=shown is None, prompt=request.prompt_length,
                    computed=computed, added=added,
                )  # fmt: skip

    def _added(self, request: Request, first: int, joined: int) -> Iterator[tuple[str, AddedBlocks]]:
        """What it has got since its first `first` slots; the first `joined` of all are shared."""
        if request.allocated > first:
            yield _SLOTS, AddedBlocks(request.slots[first : request.allocated].copy(), first, joined)
            for numbering, ratio in self._ratios.items():
                entries = request.slots[first + ratio - 1 : request.allocated : ratio] // ratio
                yield numbering, AddedBlocks(entries, first // ratio, joined // ratio)
        if (windows := self._engine.scheduler.windows) is not None:
            start = self._windows_shown.get(request.serial, request.window_start)
            given = windows.slots.of[request.slots[start : request.allocated]]
            bare = np.flatnonzero(given < 0)
            given = given[: bare[0]] if bare.size else given
            if given.size:
                self._windows_shown[request.serial] = start + given.size
                yield _WINDOW, AddedBlocks(given.copy(), start, max(0, joined - start))

    def emitted(self, name: str) -> int | None:
        """Tokens of a running request, by its name in reports."""
        running = self._engine.scheduler.running
        return next((_emitted(request) for request in running if request_name(request.id) == name), None)


class FollowsRequests(EngineAdapter):
    """An adapter whose RequestChanges answer for it."""

    requests: RequestChanges
    _observer: Observer | None

    def block_tables(self) -> dict[str, BlockTable]:
        """Of every group: by positions, window slots, compressed entries, or rows of states."""
        return self.requests.tables

    def requests_running(self) -> int:
        """By the scheduler's list."""
        return self.requests.running

    def show_requests(self) -> None:
        """Slots that requests got since somebody began or ended."""
        if self._observer is not None:
            self.requests.show(self._observer)

    def tokens_emitted(self, request: str) -> int | None:
        """By the length of its token list."""
        return self.requests.emitted(request)


def _emitted(request: Request) -> int:
    return request.length - request.prompt_length


def _table(group: object, engine: Engine) -> BlockTable:
    if isinstance(group, SwaGroup):
        return BlockTable(_WINDOW, 1, 1)
    if isinstance(group, EntryGroup):
        return BlockTable(group.numbering, 1, group.ratio)
    if isinstance(group, StateGroup):  # a row's two buffers are its request's alone, all of its life
        return BlockTable(group.view.name, 2 * group.ratio, engine.config.max_context + 1, rewritten=True)
    return BlockTable(_SLOTS, 1, 1)
