"""Records that leave the device and come back with the pages of the host tier."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from canary_obs.engine_api.observer import Observer
from canary_obs.errors import KVCacheViolation
from canary_obs.reference_engine.cache.host_tier import HostPage, HostTier, Slots, Tokens


class HostTierHooks:
    """Wraps `offload` and `load` on one tier. Pages offloaded before it came are received without records."""

    def __init__(self, tier: HostTier, observer: Observer, group: str) -> None:
        self._tier, self._observer, self._group = tier, observer, group
        self._records: WeakKeyDictionary[HostPage, Tensor] = WeakKeyDictionary()

    def wrap(self) -> None:
        """In the instance dictionary: deleting the entries restores the tier exactly."""
        offload, load = self._tier.offload, self._tier.load

        def observed_offload(tokens: Tokens, slots: Slots) -> tuple[HostPage, ...]:
            pages = offload(tokens, slots)
            self._guarded(self._keep, pages, slots)
            return pages

        def observed_load(pages: Sequence[HostPage], slots: Slots) -> None:
            load(pages, slots)
            self._guarded(self._announce, pages, slots)

        vars(self._tier).update(offload=observed_offload, load=observed_load)

    def unwrap(self) -> None:
        """Idempotent."""
        for name in ("offload", "load"):
            vars(self._tier).pop(name, None)

    def _guarded(
        self, act: Callable[[Sequence[HostPage], Tensor], None], pages: Sequence[HostPage], slots: Slots
    ) -> None:
        try:
            act(pages, torch.from_numpy(slots))
        except KVCacheViolation:
            raise  # mode raise: damaged KV must not be used
        except Exception as error:  # noqa: BLE001 - a fault of the observer's side must not reach the engine
            self._observer.fault("host_tier", error)

    def _keep(self, pages: Sequence[HostPage], slots: Tensor) -> None:
        records = self._observer.records_of(self._group, slots)
        if records is not None and pages:
            for page, mine in zip(pages, records.cpu().chunk(len(pages)), strict=True):
                self._records[page] = mine.clone()

    def _announce(self, pages: Sequence[HostPage], slots: Tensor) -> None:
        size = slots.numel() // len(pages)
        known = [page in self._records for page in pages]
        places = slots.view(len(pages), size)
        if not all(known):
            bare = [number for number, there in enumerate(known) if not there]
            self._observer.received(self._group, places[bare].reshape(-1))
        if any(known):
            kept = [number for number, there in enumerate(known) if there]
            records = torch.cat([self._records[pages[number]] for number in kept])
            self._observer.received(self._group, places[kept].reshape(-1), records)
