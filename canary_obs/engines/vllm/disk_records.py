"""Records of what vLLM's ExampleConnector keeps in files, and what its loads are compared with."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from canary_obs.copy_records.stored_copies import StoredCopies
from canary_obs.engine_api.observer import Observer
from canary_obs.engines.toolkit.method_patches import MethodPatches
from canary_obs.engines.vllm.groups import VllmGroup
from canary_obs.engines.vllm.loaded_blocks import Copies, SentCopies
from canary_obs.engines.vllm.offload_keys import StoredKey
from canary_obs.engines.vllm.offload_records import Fetch, Part


class DiskRecords:
    """Follows one connector of a worker, which keeps a prompt's whole blocks in a folder, a file per layer.

    It stores while the forward runs, whose records are complete only afterwards, and says nothing of loads
    beyond its metadata. What is known of a folder lies next to it: an empty folder would be a hit.
    """

    def __init__(
        self, groups: Sequence[VllmGroup], copies: Copies, observer: Observer, stored: StoredCopies
    ) -> None:
        # It is given the blocks of the first group alone, and refuses to run with several.
        self._groups = [group for group in groups if group.number == 0 and not group.states]
        self._copies, self._observer, self._stored = copies, observer, stored
        self._connector: Any = None
        self._stores: list[tuple[StoredKey, list[int], bool]] = []  # of the forward under way
        self._fetches: list[tuple[Fetch, dict[StoredKey, bool]]] = []

    def wrap(self, patches: MethodPatches, connector: Any) -> None:
        """Follow what this connector is to do in a step."""
        self._connector = connector
        patches.wrap(connector, "bind_connector_metadata", self._around_bind)

    def _around_bind(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def bind_connector_metadata(metadata: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                self._follow(metadata)
            except Exception as error:  # noqa: BLE001 - a fault of the canary must not reach the engine
                self._observer.fault("announce", error)
            return original(metadata, *args, **kwargs)

        return bind_connector_metadata

    def _follow(self, metadata: Any) -> None:
        self._take()
        self._stores = []
        for request in metadata.requests:
            if not len(request.slot_mapping):
                continue
            folder = self._connector._generate_foldername_debug(
                request.token_ids, request.mm_hashes, create_folder=False
            )
            named = StoredKey(os.path.basename(folder).encode(), folder)
            if request.is_store:
                self._stores.append((named, self._blocks(request), os.path.exists(folder)))
                continue
            for group in self._groups:
                name = group.view.name
                for number, block in enumerate(self._blocks(request)):
                    found = self._stored.find(named.key, (name, number), folder)
                    self._copies[name, block] = SentCopies(group.block_size, found)

    def _blocks(self, request: Any) -> list[int]:
        size = int(self._connector._block_size)
        blocks: list[int] = (request.slot_mapping[::size] // size).tolist()
        return blocks

    def end_forward(self) -> None:
        """The records of what the forward has written, and the connector stored, are complete."""
        stores, self._stores = self._stores, []
        if not stores:
            return
        try:
            for group in self._groups:
                self._fetch(group, stores)
            self._take()
        except Exception as error:  # noqa: BLE001 - what was stored is unverified when it is loaded
            self._observer.fault("announce", error)

    def _fetch(self, group: VllmGroup, stores: Sequence[tuple[StoredKey, list[int], bool]]) -> None:
        found = [
            (named, Part(block, 0, number))
            for named, blocks, _ in stores
            for number, block in enumerate(blocks)
        ]
        starts = torch.tensor([part.block for _, part in found], dtype=torch.int64) * group.block_size
        folds = self._observer.block_folds(group.view.name, starts[:, None] + torch.arange(group.block_size))
        if folds is not None:
            fetch = Fetch(group.view.name, found, folds)
            self._fetches.append((fetch, {named: existed for named, _, existed in stores}))

    def _take(self) -> None:
        while self._fetches and self._fetches[0][0].ready:
            fetch, existed = self._fetches.pop(0)
            for named, folds in fetch.by_key():
                self._stored.add(named.key, folds, named.path, existed=existed[named])
