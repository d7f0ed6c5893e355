"""When SGLang's states change outside of their requests' own forwards."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from canary_obs.engine_api.observer import Observer
from canary_obs.engines.sglang.check_order import CheckOrder
from canary_obs.engines.sglang.device_states import DeviceStates, TrackedStates
from canary_obs.engines.sglang.states import STATE
from canary_obs.engines.toolkit.guarded import guarded
from canary_obs.engines.toolkit.method_patches import MethodPatches
from canary_obs.vocabulary import HOST_PEER

_KEPT = 32  # announced lists of slots, which checks on a stream of their own may still read


class ShownStates(Protocol):
    """How views show states."""

    states: DeviceStates | None  # None = on a CPU
    tracked: TrackedStates | None  # None = forwards leave none for the prefix cache


class StateHooks:
    """Announces changes that no request's own forward makes to its state.

    SGLang clears the state of a new request, or copies one of the prefix cache to it, within its forward.
    The same call is made before the forward's checks here, so that these find a damaged source, or a copy
    that went wrong; within the forward nothing of it is left to do.
    """

    def __init__(
        self,
        runner: Any,
        observer: Observer,
        checks: CheckOrder,
        shown: ShownStates,
    ) -> None:
        """`shown`: of the views that are shown."""
        self._runner, self._observer = runner, observer
        self._states, self._tracked, self._checks = shown.states, shown.tracked, checks
        self._kept = deque[Tensor](maxlen=_KEPT)

    def wrap(self, patches: MethodPatches) -> None:
        """From now on; `patches` undoes that. Call after the forward itself was wrapped."""
        if self._states is not None and self._tracked is not None:  # else the prefix cache may have them
            observer, states = self._observer, self._states
            states.every, states.leave = observer.state_interval, self._leave
            states.adoptions = lambda: observer.adoptions
        pool = self._runner.req_to_token_pool.mamba_pool
        patches.wrap(pool, "clear_slots", self._around_clear)
        patches.wrap(pool, "copy_from", self._around_copy)
        patches.wrap(pool, "get_cpu_copy", self._around_copy_out)
        patches.wrap(pool, "load_cpu_copy", self._around_load)
        patches.wrap(self._runner, "forward", self._around_forward)

    def _around_clear(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def clear_slots(indices: Tensor) -> Any:
            slots = self._slots(indices)
            self._before_load(slots)
            result = original(indices)
            self._announce(self._observer.invalidated, slots)
            return result

        return clear_slots

    def _around_copy(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def copy_from(src_indices: Tensor, dst_indices: Tensor) -> Any:
            source, destination = self._slots(src_indices), self._slots(dst_indices)
            self._before_load(destination)
            result = original(src_indices, dst_indices)
            self._announce(self._observer.copied, source, destination)
            return result

        return copy_from

    def _around_copy_out(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def get_cpu_copy(indices: Tensor) -> Any:
            copy = original(indices)
            if type(copy) is not tuple:
                return copy
            kept = _StateCopy(copy)
            kept.records = self._announce(self._observer.records_of, self._slots(indices))
            return kept

        return get_cpu_copy

    def _around_load(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def load_cpu_copy(mamba_cache_cpu: Any, indices: Tensor) -> Any:
            slots, records = self._slots(indices), getattr(mamba_cache_cpu, "records", None)
            self._before_load(slots)
            result = original(mamba_cache_cpu, indices)
            if records is None:
                self._announce(self._observer.received, slots)
            else:
                self._announce(self._observer.received, slots, records, HOST_PEER)
            return result

        return load_cpu_copy

    def _around_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(batch: Any, *args: Any, **kwargs: Any) -> Any:
            if self._states is not None and not batch.forward_mode.is_decode():
                self._rest(self._states)
            self._runner._maybe_execute_deferred_mamba_cow_and_clear(batch)
            if self._tracked is None:
                return original(batch, *args, **kwargs)
            observer, given = self._observer, (self._observer, self._checks)
            left = guarded(observer, "announce", self._tracked.begin, batch, *given)
            result = original(batch, *args, **kwargs)
            if left is not None:
                guarded(observer, "announce", self._tracked.end, left, *given)
            return result

        return forward

    def _leave(self, slots: Tensor) -> None:
        """On the stream of the forward that comes, after all checks so far."""
        self._observer.before_load(STATE, slots)
        self._observer.awaited(STATE, slots)

    def _rest(self, states: DeviceStates) -> None:
        """Requests that decoded are left alone by the forward that comes, which may damage their states."""
        if (left := states.take_left()) is not None:
            self._announce(self._observer.received, left)

    def _before_load(self, slots: Tensor) -> None:
        self._announce(self._observer.before_load, slots)
        self._checks.precede()

    def _announce(self, hook: Callable[..., Any], *given: object) -> Any:
        with self._checks.in_order():
            return guarded(self._observer, "announce", hook, STATE, *given)

    def _slots(self, indices: Tensor) -> Tensor:
        """int64 [n]; SGLang gives the index of a single one without a dimension."""
        slots = indices.to(torch.int64).reshape(-1)
        self._kept.append(slots)
        return slots


class _StateCopy(tuple[Any, ...]):
    """A copy of states in host memory, with their records: they end together."""

    records: Tensor | None  # int64 [n, RECORD_WORDS]
