"""What the canary needs of an engine. Subclass both classes here to protect an engine of your own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from torch import Tensor

from canary_obs.engine_api.healing import HealingLink
from canary_obs.engine_api.observer import Observer
from canary_obs.engine_api.requests import BlockTable, StoredIn
from canary_obs.engine_api.views import (
    CachedCount,
    CachedSlots,
    ComparedTables,
    GroupView,
    KVAllocation,
    StepTypes,
    WindowTokens,
)
from canary_obs.engine_api.walks import CachedWalk, WholeWalk
from canary_obs.errors import UnsupportedEngine


class PrefixCache(ABC):
    """The engine's prefix cache, as sweeps read it. Results are CPU tensors."""

    @abstractmethod
    def cached(self, group: str, *, unlocked_only: bool) -> CachedSlots:
        """Every slot of `group` in the cache; `unlocked_only` leaves out those that running requests use.

        Starts the period that `still_cached` refers to. Raises UnsupportedEngine when the content is
        unknown: the sweep fails with that reason.
        """

    def walk(self, group: str) -> CachedWalk:
        """What `cached` shows of the whole group, to be shown some slots at a time; starts the same period.

        Overridden where showing all slots at once would hold up an engine's step.
        """
        return WholeWalk(self.cached(group, unlocked_only=False))

    @abstractmethod
    def still_cached(self, group: str, slots: Tensor) -> Tensor:
        """bool [n]: `slots` (int64 [n]) stayed cached, without a break, since the group's period began."""

    def count(self, group: str) -> CachedCount | None:
        """The engine's own count of the group's slots in the cache, at the same moment as `cached`.

        From another source than `cached`, which it is compared with at the start of every sweep. None =
        unknown, and the state is at best `degraded` from the first sweep on.
        """
        del group
        return None

    def swa_resident(self, group: str, slots: Tensor) -> Tensor | None:
        """bool [n]: the tokens of `slots` (int64 [n]) have a slot in the sliding-window group as well.

        None = unknown, or there is no such group.
        """
        del group, slots
        return None


class EngineAdapter(ABC):
    """One engine instance: describes its KV cache, and calls an Observer around its forwards.

    What may depend on the engine's state raises UnsupportedEngine with the reason.
    """

    name: str  # of the engine, as in metrics: "vllm"
    version: str  # of the engine
    # What is to be said of a version that nobody has tested: the state is at best `degraded`. None = tested.
    untried: str | None = None
    # Device memory of records that the adapter keeps itself, such as those of host slots; from `attach` on.
    record_bytes: int = 0
    healing: HealingLink | None = None  # the way to the scheduler; None = damage cannot be healed

    @property
    @abstractmethod
    def groups(self) -> Sequence[GroupView]:
        """The engine's KV groups, always the same ones in the same order."""

    @property
    @abstractmethod
    def prefix_cache(self) -> PrefixCache:
        """The engine's prefix cache."""

    @abstractmethod
    def slots_in_use(self, group: str) -> Tensor:
        """int64 [n] on the CPU: slots of running requests and of the prefix cache."""

    def foreign_slots(self, group: str) -> Tensor | None:
        """int64 [n] on the CPU: slots without KV of `group`, whose bytes another group may write.

        Asked when all records of the group were declared unknown: these get no baseline, as they may change
        at any time. None = every slot's bytes are its group's alone. Must not wait for the device.
        """
        del group
        return None

    @abstractmethod
    def holders(self, group: str, slot: int) -> tuple[str, ...]:
        """Ids of the running requests that use the slot. Asked for evidence only: may wait for the device."""

    def request_slots(self, group: str, request: str) -> Tensor | None:
        """int64 [n] on the CPU: slots of a running request; none where no such request runs.

        `request` is an id as violations report it: `request_name` of the engine's. None = unknown: a sweep of
        one request is refused. Must not wait for the device.
        """
        del group, request
        return None

    @abstractmethod
    def attach(self, observer: Observer) -> None:
        """Start calling the observer. Raises UnsupportedEngine before anything is changed."""

    @abstractmethod
    def detach(self) -> None:
        """Restore the engine exactly; idempotent."""

    def model(self) -> str | None:
        """The model it serves, with its revision where that is known; None = unknown. Must not raise."""
        return None

    def allocation(self) -> KVAllocation | None:
        """The KV that the engine has, from another source than `groups`. None = unknown: `degraded`."""
        return None

    def forwards(self) -> Mapping[str, int] | None:
        """Forwards with tokens since the engine's start, by group name; a draft model's by its own groups.

        Counted when a forward is about to run, by the engine or where its scheduler hands out work: not by
        the hooks that call the observer, which it is compared with. Called several times per step; may return
        the same mapping each time. None = unknown, and the state is at best `degraded`.
        """
        return None

    def prefix_hits(self) -> Mapping[str, int] | None:
        """Slots that joined requests through the prefix cache since the engine's start, by group name.

        Counted by the engine when it admits a request, and compared with what `Observer.hit` was given.
        Called once per step; may return the same mapping each time. {} = there is no prefix cache. None =
        unknown, and the state is at best `degraded` as long as hits are to be compared.
        """
        return None

    def compared_tables(self) -> Mapping[str, ComparedTables] | None:
        """By group: forwards whose view was compared with the slots that attention was given.

        For an engine that prepares what attention reads apart from the tensors that its views are made of.
        None = there is nothing apart; a group that is left out likewise.
        """
        return None

    def traceparent(self, request: str) -> str | None:  # noqa: ARG002 - for adapters that know
        """The W3C trace context that a request came with; None = unknown.

        `request` is an id as violations report it: `request_name` of the engine's. Asked once per finding,
        whose request may have ended. Must not wait.
        """
        return None

    def requests_scheduled(self) -> int | None:
        """Requests with tokens in forwards since the engine's start, where its scheduler hands out work.

        Every one of them is due a comparison of its tokens with `known_digests`; the count is not the view's.
        None = views have no `known_digests`.
        """
        return None

    def block_tables(self) -> Mapping[str, BlockTable] | None:
        """By group: where its slots are in the block lists that `Observer.requests_changed` shows.

        A group that is left out, and every group with None, is not followed: which requests read a damaged
        slot of it is then not known, and said to be so.
        """
        return None

    def requests_running(self) -> int | None:
        """Requests that the engine runs now. Asked at attach, before the first change. None = not known."""
        return None

    def show_requests(self) -> None:
        """Call `Observer.requests_changed` with what was not shown yet.

        Asked before a finding is followed, and before the requests that run are first asked for.

        For an engine whose requests get slots in every step: to show those only now costs a step nothing.
        They count as held from the change before on.
        """
        return

    def copies_stored_in(self) -> StoredIn | None:
        """Where copies of blocks may be that later requests load. Must not wait.

        Where not all of it is `shown`, who loads KV that was computed from damage is not known, and said to
        be so. None = nowhere, or from where all is shown and every load is compared.
        """
        return None

    def tokens_emitted(self, request: str) -> int | None:
        """Tokens of a running request up to the last forward. Asked where it read damage; None = not known.

        `request` is an id as violations report it: `request_name` of the engine's. Must not wait.
        """
        del request
        return None

    @property
    def step_types(self) -> StepTypes | None:
        """Types of all views to come: kernels are compiled for them before traffic. None = at first use."""
        return None

    def in_step(self) -> bool:
        """Whether the engine's thread or device is in a step now; called from any thread.

        A step that lasts is no silence. Not needed for the time between `before_write` and `after_forward`.
        """
        return False

    def window_tokens(self) -> WindowTokens | None:
        """Live tokens by what sliding-window groups hold for them, from the engine's host data.

        None = no such groups, or no live tokens now.
        """
        return None

    def reserve_scratch_slot(self) -> tuple[str, int]:
        """A group and one of its slots without live KV until detach: drills inject faults there."""
        raise UnsupportedEngine(f"the adapter of {self.name} has no scratch slot: drills are impossible")
