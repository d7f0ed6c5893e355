"""The contract between the canary and an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from canary_obs.engine_api.views import CachedSlots, GroupView, StepView


class Observer(Protocol):
    """What an adapter calls. Every method returns at once; in mode `log` none of them raises."""

    overhead: dict[str, float]  # seconds of host time by hook; an adapter adds its own to "adapter"

    def before_forward(self, step: StepView) -> None:
        """Just before the model forward, on the stream that runs it."""

    def before_write(self, step: StepView) -> None:
        """In its place, where the forward's inputs last until its work is done. `launched` follows.

        The view may lack the requests' ids, digests and expected ids: they come with `launched`.
        """

    def launched(self, step: StepView) -> None:
        """The forward was launched, and its view is complete; on a stream ordered behind `overwriting`."""

    def after_forward(self, step: StepView) -> None:
        """Just after the model forward: on its stream, or on one ordered behind it and behind `launched`.

        Nothing may change the view's tensors or the slot tables before this work is done.
        """

    def forward_failed(self, step: StepView) -> None:
        """The model forward raised; what it should have written is unknown."""

    def fault(self, part: str, error: Exception) -> None:
        """The adapter itself failed (part names where); counted, turns the state to `blind`."""

    def after_step(self, beside: AbstractContextManager[None] = ...) -> None:
        """Once per engine step, after its forwards were launched, outside any captured graph.

        Best before the engine waits for their results: work then hides behind the forward. What this launches
        is launched inside `beside`, by default on the current stream: one ordered behind `after_forward`. It
        is entered only when there is something to launch, as entering a stream takes the host time.
        """

    def idle(self) -> bool:
        """Called by the engine's idle loop; True = there is more to do, call again soon."""

    def copied(self, group: str, source: Tensor, destination: Tensor) -> None:
        """The engine copied KV bytes between slots (int64 [n] each)."""

    def received(self, group: str, slots: Tensor, records: Tensor | None = None) -> None:
        """Bytes arrived from elsewhere (int64 [n]).

        `records` came with them (`records_of` at the sender): int64 [n, RECORD_WORDS], or [shares, n,
        RECORD_WORDS] from senders that hold different heads or layers. The bytes are compared at once, and in
        mode `raise` damage raises here, before it is used. Without records the slots count as unverified.
        """

    def records_of(self, group: str, slots: Tensor, shares: Sequence[range] = ()) -> Tensor | None:
        """Records to send along with the bytes of slots (int64 [n]); None = not available.

        int64 [n, RECORD_WORDS]; with `shares` (ranges of global heads, all that are held here) int64
        [len(shares), n, RECORD_WORDS], whose fingerprints add up.
        """

    def record_format(self, group: str) -> int | None:
        """Records of a sender with another number must not be passed to `received`; None = not protecting."""

    def invalidated(self, group: str, slots: Tensor) -> None:
        """The engine no longer vouches for these slots (int64 [n]); their records are emptied."""


class PrefixCacheView(Protocol):
    """The engine's prefix cache, walked by sweeps. Results are CPU tensors: the cache is a host structure."""

    def cached(self, group: str, *, unlocked_only: bool) -> CachedSlots:
        """Every slot the cache holds now; marks the moment that `still_cached` refers to."""

    def still_cached(self, group: str, slots: Tensor) -> Tensor:
        """bool [n]: held without interruption since the last `cached` call for this group."""


class EngineAdapter(Protocol):
    """One per engine. Finds the KV tensors, wires the observer in, and takes it out again exactly."""

    name: str
    version: str

    @property
    def groups(self) -> Sequence[GroupView]:
        """The engine's KV groups, in slot order."""

    @property
    def prefix_cache(self) -> PrefixCacheView:
        """The engine's prefix cache."""

    def slots_in_use(self, group: str) -> Tensor:
        """int64 [n]: slots that hold live content now (running requests and prefix cache), on the CPU."""

    def holders(self, group: str, slot: int) -> tuple[str, ...]:
        """Requests that use the slot now; may wait for the device: asked for evidence only."""

    def attach(self, observer: Observer) -> None:
        """Start calling the observer. Raises UnsupportedEngine before touching anything."""

    def detach(self) -> None:
        """Restore the engine exactly; idempotent."""
