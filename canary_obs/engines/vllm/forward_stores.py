"""Records of copies that are stored while a forward runs: the records of its slots are complete later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from canary_obs.copy_records.stored_copies import StoredCopies
from canary_obs.engine_api.observer import Observer
from canary_obs.engines.vllm.groups import VllmGroup
from canary_obs.engines.vllm.offload_keys import StoredKey
from canary_obs.engines.vllm.offload_records import Fetch, folds_of


class Store(NamedTuple):
    """A copy that is being stored, its blocks by their places, and whether its file was there before."""

    named: StoredKey
    blocks: Sequence[tuple[int, int]]  # place, block
    existed: bool


class ForwardStores:
    """Takes the folds of what was stored when the forward has ended, and keeps them once they are there."""

    def __init__(self, groups: Sequence[VllmGroup], observer: Observer, stored: StoredCopies) -> None:
        self._groups, self._observer, self._stored = groups, observer, stored
        self._stores: list[Store] = []  # of the forward under way
        self._ended = False  # whether the records of that forward are complete
        self._fetches: list[tuple[Fetch, dict[StoredKey, bool]]] = []

    def begin_forward(self) -> None:
        """What a forward that failed has stored stays unknown.

        The V2 model runner lets its connector store when the forward has ended, and sampled.
        """
        if self._ended:
            self.end_forward()
        self.take()
        self._stores, self._ended = [], False

    def note(self, store: Store) -> None:
        """A copy is stored, or will be, during the forward under way."""
        self._stores.append(store)

    def end_forward(self) -> None:
        """The records of what the forward has written, and the connector stored, are complete."""
        stores, self._stores, self._ended = self._stores, [], True
        if not stores:
            return
        try:
            for group in self._groups:
                self._fetch(group, stores)
            self.take()
        except Exception as error:  # noqa: BLE001 - what was stored is unverified when it is loaded
            self._observer.fault("announce", error)

    def _fetch(self, group: VllmGroup, stores: Sequence[Store]) -> None:
        named = [store.named for store in stores for _ in store.blocks]
        places = [place for store in stores for place, _ in store.blocks]
        blocks = [block for store in stores for _, block in store.blocks]
        folds = folds_of(blocks, group, self._observer)
        if folds is not None:
            fetch = Fetch(group.view.name, named, places, folds)
            existed = dict[StoredKey, bool]()
            for store in stores:  # what is stored twice may be there when it is stored again
                existed[store.named] = existed.get(store.named, True) and store.existed
            self._fetches.append((fetch, existed))

    def take(self) -> None:
        """Keep the folds that have reached the host."""
        while self._fetches and self._fetches[0][0].ready:
            fetch, existed = self._fetches.pop(0)
            for named, folds in fetch.by_key():
                self._stored.add(named.key, folds, named.path, existed=existed[named])
