"""Records that travel to host memory and back with the pages of the host tier."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from canary_obs.engine_api.observer import Observer
from canary_obs.engines.reference.request_changes import RequestChanges
from canary_obs.engines.toolkit.guarded import guarded
from canary_obs.engines.toolkit.method_patches import MethodPatches
from canary_obs.reference_engine.cache.host_tier import HostPage, HostTier, Slots, Tokens
from canary_obs.vocabulary import HOST_PEER


class HostTierHooks:
    """Wraps `offload` and `load` of one tier. Pages that were offloaded before have no records."""

    def __init__(
        self, tier: HostTier, observer: Observer, groups: Sequence[str],
        join: Callable[[], None], requests: RequestChanges,
    ) -> None:  # fmt: skip
        """groups: those whose slots are the tier's; each has records of its own.

        `join`: later launches wait for checks that are still under way.
        """
        self._tier, self._observer, self._groups, self._join = tier, observer, tuple(groups), join
        self._requests = requests
        self._records: WeakKeyDictionary[HostPage, dict[str, Tensor]] = WeakKeyDictionary()

    def wrap(self, patches: MethodPatches) -> None:
        """Wrap both methods on the instance."""
        patches.wrap(self._tier, "offload", self._around_offload)
        patches.wrap(self._tier, "load", self._around_load)

    def _around_offload(self, offload: Callable[..., tuple[HostPage, ...]]) -> Callable[..., Any]:
        def observed_offload(tokens: Tokens, slots: Slots) -> tuple[HostPage, ...]:
            pages = offload(tokens, slots)
            guarded(self._observer, "host_tier", self._keep_records, pages, torch.from_numpy(slots))
            self._requests.show_stored(_keys(pages, slots), slots, self._observer)
            return pages

        return observed_offload

    def _around_load(self, load: Callable[..., None]) -> Callable[..., Any]:
        def observed_load(pages: Sequence[HostPage], slots: Slots) -> None:
            guarded(self._observer, "host_tier", self._compare_before, torch.from_numpy(slots))
            load(pages, slots)
            self._requests.show_loaded(_keys(pages, slots), slots, self._observer)
            guarded(self._observer, "host_tier", self._report_received, pages, torch.from_numpy(slots))

        return observed_load

    def _compare_before(self, slots: Tensor) -> None:
        self._join()
        for group in self._groups:
            self._observer.before_load(group, slots)

    def _keep_records(self, pages: Sequence[HostPage], slots: Tensor) -> None:
        for group in self._groups:
            records = self._observer.records_of(group, slots)
            if records is not None and pages:
                for page, own in zip(pages, records.cpu().chunk(len(pages)), strict=True):
                    self._records.setdefault(page, {})[group] = own.clone()

    def _report_received(self, pages: Sequence[HostPage], slots: Tensor) -> None:
        by_page = slots.view(len(pages), slots.numel() // len(pages))
        for group in self._groups:
            records = [self._records.get(page, {}).get(group) for page in pages]
            without = [number for number, own in enumerate(records) if own is None]
            known = [number for number, own in enumerate(records) if own is not None]
            if without:
                self._observer.received(group, by_page[without].reshape(-1))
            if known:
                sent = torch.cat([own for own in records if own is not None])
                self._observer.received(group, by_page[known].reshape(-1), sent, HOST_PEER)


def _keys(pages: Sequence[HostPage], slots: Slots) -> list[bytes]:
    """Of each slot: that of its page, and its place there."""
    places = range(slots.size // len(pages) if pages else 0)
    return [page.key + place.to_bytes(4, "little") for page in pages for place in places]
