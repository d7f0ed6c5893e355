"""Records that travel with KV to host memory and back while forwards run on a GPU."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from canary_kernels import layout
from canary_obs.engine_api.observer import Observer
from canary_obs.engines.sglang.groups import FULL
from canary_obs.engines.toolkit.engine_methods import check_methods
from canary_obs.engines.toolkit.guarded import guarded
from canary_obs.engines.toolkit.method_patches import MethodPatches
from canary_obs.runtime.device.uploads import uploaded
from canary_obs.vocabulary import HOST_PEER

log = logging.getLogger("canary_obs")
# Checked here, as their module is imported only where SGLang has such a cache.
_HOOKS: dict[str, dict[str, tuple[str, ...]]] = {
    "sglang.srt.managers.cache_controller:HiCacheController": {"start_writing": (), "start_loading": ()}
}


class Checks(Protocol):
    """The checks of an engine, on streams of its device."""

    def in_order(self) -> AbstractContextManager[None]:
        """Launches inside follow all checks so far, and what the current stream was given."""

    def precede(self) -> None:
        """What the current stream is given next follows all checks so far."""


class _Load(NamedTuple):
    """KV on its way to the device."""

    slots: Tensor  # int64 [n] on the device
    sent: Tensor  # int64 [n, RECORD_WORDS] on the device: records of the host slots that it comes from
    known: NDArray[np.bool_]  # [n]: whether there was one


class HierarchicalCache:
    """Follows a cache controller of SGLang 0.5.16. Each of its host slots has a record, on the device.

    The controller copies on streams of its own. A load begins after the checks of the forward under way, as
    what is written over is compared before, and runs next to the forward that reads it, layer by layer.
    What follows it is `arrive`.
    """

    def __init__(self, controller: Any, observer: Observer, checks: Checks, device: torch.device) -> None:
        """Raises UnsupportedEngine for a controller without the methods that are wrapped."""
        check_methods("SGLang", _HOOKS)
        self._controller, self._observer, self._checks = controller, observer, checks
        slots = int(controller.mem_pool_host.size)
        with torch.inference_mode(False):
            self._records = torch.zeros((slots, layout.RECORD_WORDS), dtype=torch.int64, device=device)
        log.info("records of %d host slots take %d B of device memory", slots, self._records.nbytes)
        self._known = np.zeros(slots, dtype=np.bool_)
        self._loading = deque[tuple[_Load, Any]]()  # with the event of its end
        self.compared = 0  # slots that came back with a record
        self.without = 0  # that came back without

    @property
    def device_bytes(self) -> int:
        """Device memory of the host slots' records."""
        return self._records.nbytes

    def wrap(self, patches: MethodPatches) -> None:
        """Follow from now on; `patches` undoes that. What was copied before has no record."""
        patches.wrap(self._controller, "start_writing", self._around_writing)
        patches.wrap(self._controller, "start_loading", self._around_loading)
        patches.wrap(self._controller.mem_pool_host, "alloc", self._around_alloc)

    def arrive(self) -> None:
        """Compare what was loaded; on the stream of checks, which waits for the loads under way."""
        while self._loading:
            guarded(self._observer, "host_tier", self._compare, *self._loading.popleft())

    def _around_writing(self, original: Callable[[], Any]) -> Callable[[], Any]:
        def start_writing() -> Any:
            copies = list(self._controller.write_queue)
            done = original()
            if copies:
                guarded(self._observer, "host_tier", self._keep, copies)
            return done

        return start_writing

    def _around_loading(self, original: Callable[[], Any]) -> Callable[[], Any]:
        def start_loading() -> Any:
            copies, loads = list(self._controller.load_queue), list[_Load]()
            if copies:
                guarded(self._observer, "host_tier", self._before_load, copies, loads)
            if copies and not loads:  # that has failed: what will lie there is not what is known of it
                guarded(self._observer, "host_tier", self._await, copies)
            done = original()
            for load in loads:
                self._loading.append((load, self._controller.ack_load_queue[-1].finish_event))
            return done

        return start_loading

    def _around_alloc(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """What is put into a host slot has no record until one came with it: the last content's is stale."""

        def alloc(*given: Any, **named: Any) -> Any:
            slots = original(*given, **named)
            if slots is not None:
                guarded(self._observer, "host_tier", self._mark, slots, False)
            return slots

        return alloc

    def _mark(self, host_slots: Tensor, known: bool) -> None:
        self._known[host_slots.numpy()] = known

    def _keep(self, copies: Sequence[Any]) -> None:
        host = torch.cat([copy.host_indices for copy in copies])
        with self._checks.in_order():
            found = self._observer.records_of(FULL, _slots(copies))
            if found is not None:
                self._records.index_copy_(0, uploaded(host, self._records.device), found)
        self._mark(host, found is not None)

    def _before_load(self, copies: Sequence[Any], loads: list[_Load]) -> None:
        host = torch.cat([copy.host_indices for copy in copies])
        with self._checks.in_order():
            slots = _slots(copies)
            self._observer.before_load(FULL, slots)
            self._observer.awaited(FULL, slots)
            sent = self._records[uploaded(host, self._records.device)]
        self._checks.precede()  # the load follows the current stream
        loads.append(_Load(slots, sent, self._known[host.numpy()]))

    def _await(self, copies: Sequence[Any]) -> None:
        with self._checks.in_order():
            self._observer.awaited(FULL, _slots(copies))

    def _compare(self, load: _Load, finished: Any) -> None:
        finished.wait()
        slots, sent, known = load
        self.compared += (compared := int(known.sum()))
        self.without += known.size - compared
        if compared == known.size:
            self._observer.received(FULL, slots, sent, HOST_PEER)
        else:
            there, without = (
                uploaded(torch.from_numpy(np.flatnonzero(each)), slots.device) for each in (known, ~known)
            )
            if compared:
                self._observer.received(FULL, slots[there], sent[there], HOST_PEER)
            self._observer.received(FULL, slots[without])
        _use(slots, sent)


def _slots(copies: Sequence[Any]) -> Tensor:
    """int64 [n] on the device."""
    slots = [copy.device_indices for copy in copies]
    _use(*slots)
    return torch.cat(slots).to(torch.int64)


def _use(*tensors: Tensor) -> None:
    """The current stream reads them, which others made and may let go of: their memory stays until then."""
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
