"""Records of what vLLM's ExampleConnector keeps in files, and what its loads are compared with."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from canary_obs.copy_records.stored_copies import StoredCopies
from canary_obs.engine_api.observer import Observer
from canary_obs.engines.toolkit.guarded import guarded
from canary_obs.engines.toolkit.method_patches import MethodPatches
from canary_obs.engines.vllm.forward_stores import ForwardStores, Store
from canary_obs.engines.vllm.groups import VllmGroup
from canary_obs.engines.vllm.offload_keys import StoredKey
from canary_obs.engines.vllm.sent_copies import Copies


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
        self.stores = ForwardStores(self._groups, observer, stored)

    def wrap(self, patches: MethodPatches, connector: Any) -> None:
        """Follow what this connector is to do in a step."""
        self._connector = connector
        patches.wrap(connector, "bind_connector_metadata", self._around_bind)

    def _around_bind(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def bind_connector_metadata(metadata: Any, *args: Any, **kwargs: Any) -> Any:
            guarded(self._observer, "announce", self._follow, metadata)
            return original(metadata, *args, **kwargs)

        return bind_connector_metadata

    def _follow(self, metadata: Any) -> None:
        self.stores.begin_forward()
        for request in metadata.requests:
            if not len(request.slot_mapping):
                continue
            folder = self._connector._generate_foldername_debug(
                request.token_ids, request.mm_hashes, create_folder=False
            )
            named = StoredKey(os.path.basename(folder).encode(), folder)
            if request.is_store:
                blocks = list(enumerate(self._blocks(request)))
                self.stores.note(Store(named, blocks, os.path.exists(folder)))
                continue
            for group in self._groups:
                name, held = group.view.name, self._blocks(request)
                known = self._stored.copies(named.key, folder)
                found = [known.get((name, number)) or () for number in range(len(held))]
                self._copies.put(name, held, group.block_size, found)

    def _blocks(self, request: Any) -> list[int]:
        size = int(self._connector._block_size)
        blocks: list[int] = (request.slot_mapping[::size] // size).tolist()
        return blocks
