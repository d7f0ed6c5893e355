"""Shows which requests hold which slots: as they begin and end, and before a finding is followed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from canary_obs.engine_api.adapter import EngineAdapter
from canary_obs.engine_api.observer import Observer
from canary_obs.engine_api.requests import AddedBlocks, BlockTable, ChangedRequests, RequestChange
from canary_obs.engines.reference.full_group import FullGroup
from canary_obs.engines.toolkit.method_patches import MethodPatches
from canary_obs.reference_engine.engine import Engine
from canary_obs.reference_engine.execution.batch import ForwardBatch
from canary_obs.reference_engine.scheduling.request import Request, Status
from canary_obs.slot_facts import request_name

_SLOTS = "slots"  # of positions; windows and compressed entries have numberings of their own


class RequestChanges:
    """A step in which nobody begins or ends shows nothing: slots that requests get are shown later."""

    def __init__(self, engine: Engine, groups: Mapping[str, object]) -> None:
        self._engine = engine
        self.tables = {
            name: BlockTable(_SLOTS, 1, 1) for name, group in groups.items() if isinstance(group, FullGroup)
        }
        self._shown: dict[int, int] = {}  # by serial of a request that runs: how many of its slots

    @property
    def running(self) -> int:
        """Requests that run now."""
        return len(self._engine.scheduler.running)

    def wrap(self, patches: MethodPatches, observer: Observer) -> None:
        """Follow who ends: from then on others may get its slots."""

        def make(release: Callable[[Request, Status], None]) -> Callable[..., None]:
            def observed(request: Request, status: Status) -> None:
                self._end(request, observer)
                release(request, status)

            return observed

        patches.wrap(self._engine.scheduler, "release", make)

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

    def _end(self, request: Request, observer: Observer) -> None:
        self.show(observer)
        if self._shown.pop(request.serial, None) is not None:
            observer.requests_changed(ChangedRequests(ended={request.id: _emitted(request)}))

    def _changes(self) -> Iterator[RequestChange]:
        for request in self._engine.scheduler.running:
            shown = self._shown.get(request.serial)
            first = shown or 0
            if shown is None or request.allocated > first:
                joined = request.shared if shown is None else 0
                added = AddedBlocks(request.slots[first : request.allocated].copy(), first, joined)
                self._shown[request.serial] = request.allocated
                yield RequestChange(
                    request=request.id, begins=shown is None, prompt=request.prompt_length,
                    computed=max(first, joined), added={_SLOTS: added},
                )  # fmt: skip

    def emitted(self, name: str) -> int | None:
        """Tokens of a running request, by its name in reports."""
        running = self._engine.scheduler.running
        return next((_emitted(request) for request in running if request_name(request.id) == name), None)


class FollowsRequests(EngineAdapter):
    """An adapter whose RequestChanges answer for it."""

    requests: RequestChanges
    _observer: Observer | None

    def block_tables(self) -> dict[str, BlockTable]:
        """Of the groups that share the slot numbers of `full`."""
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
