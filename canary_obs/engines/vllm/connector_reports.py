"""Follows what a worker's KV connector reports of its loads: complete, failed, blocks that are missing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from hashlib import blake2b
from typing import Any

from canary_obs.config import CanaryConfig, load
from canary_obs.copy_records.record_files import RecordFiles, read_key
from canary_obs.copy_records.sent_records import Seals
from canary_obs.copy_records.stored_copies import StoredCopies
from canary_obs.engine_api.observer import Observer
from canary_obs.engine_api.requests import StoredIn
from canary_obs.engines.toolkit.guarded import guarded
from canary_obs.engines.toolkit.method_patches import MethodPatches
from canary_obs.engines.vllm.connector_loads import ConnectorLoads
from canary_obs.engines.vllm.disk_records import DiskRecords
from canary_obs.engines.vllm.groups import VllmGroup
from canary_obs.engines.vllm.lmcache_records import LmcacheRecords
from canary_obs.engines.vllm.mooncake_records import MooncakeRecords
from canary_obs.engines.vllm.offload_keys import class_names, connectors_named
from canary_obs.engines.vllm.offload_records import OffloadRecords, jobs_of
from canary_obs.engines.vllm.received_blocks import TransferRecords
from canary_obs.engines.vllm.step_hooks import StepHooks

_STORES = "OffloadingConnector", "ExampleConnector", "LMCacheConnectorV1"
# The others may store parts, as LMCache does with `save_unfull_chunk`.
_OF_WHOLE_BLOCKS = {"OffloadingConnector", "SimpleCPUOffloadConnector", "ExampleConnector"}
# They send blocks to the engine that goes on with the request, or read and write no KV that others load.
_WITHOUT_STORE = {
    "NixlConnector", "NixlPullConnector", "NixlPushConnector", "MooncakeConnector", "MoRIIOConnector",
    "ExampleHiddenStatesConnector", "DecodeBenchConnector",
}  # fmt: skip


def worker_connector() -> Any:
    """The KV connector of the worker of this process; None = it has none."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    return get_kv_transfer_group() if has_kv_transfer_group() else None


class ConnectorReports:
    """Wraps the two methods by which a model runner asks its connector; any connector has both.

    What some connectors store and send is followed as well, so that loads can be compared with that.
    """

    def __init__(
        self, loads: ConnectorLoads, groups: Sequence[VllmGroup], show_requests: Callable[[], None]
    ) -> None:
        """`show_requests`: shows the changes of the step under way; they precede what it stores or loads."""
        self._loads, self._show_requests = loads, show_requests
        self._groups = [group for group in groups if group.of_tokens]
        self._stored_groups = [group for group in groups if group.of_tokens or group.states]
        self._observer: Observer  # while attached
        self.followed = False  # the worker has a connector
        self._results: Any = None  # of `get_transfer_results`, until the failed blocks are known as well
        self.offloads: list[OffloadRecords] = []
        self.disks: list[DiskRecords] = []
        self.lmcaches: list[LmcacheRecords] = []
        self.mooncakes: list[MooncakeRecords] = []
        self.record_files: RecordFiles | None = None
        self.transfers: TransferRecords | None = None
        self.stored_in: StoredIn | None = None  # connectors that may store blocks for requests to come

    def attach(self, patches: MethodPatches, observer: Observer, hooks: StepHooks) -> None:
        """Follow the worker's connector, if it has one, and those inside of it, until `patches` are restored.

        Raises ConfigurationError for a key that cannot be used.
        """
        self._observer, connector = observer, worker_connector()
        if connector is None:
            return
        self.followed = True
        if stores := set(class_names(connector)) - _WITHOUT_STORE:
            self.stored_in = StoredIn(", ".join(sorted(stores)), whole=stores <= _OF_WHOLE_BLOCKS)
        hooks.after_launch.append(self._begin_loads)
        hooks.late_reports = lambda: bool(self._loads.landing)
        after_checks = hooks.after_checks
        config = load(CanaryConfig)
        patches.wrap(connector, "get_transfer_results", self._around_results)
        patches.wrap(connector, "get_block_ids_with_load_errors", self._around_errors)
        if config.copy_records:
            self.transfers = TransferRecords(self._stored_groups, self._loads.copies, observer)
            self.transfers.wrap(patches, connector)
            after_checks.append(self.transfers.end_forward)
            for each in connectors_named(connector, {"MooncakeConnector"}):
                seals = Seals(read_key(config.copy_records_key_file))
                records = MooncakeRecords(
                    self._stored_groups, self.transfers, observer, seals, config.instance
                )
                if records.wrap(patches, each):
                    after_checks.append(records.end_forward)
                    self.transfers.by_transfer = True
                    self.mooncakes.append(records)
            self._follow_stores(patches, config, hooks)

    def _follow_stores(self, patches: MethodPatches, config: CanaryConfig, hooks: StepHooks) -> None:
        found = [list(connectors_named(worker_connector(), {name})) for name in _STORES]
        if not any(found):
            return
        offloads, disks, lmcaches = found
        self.record_files = RecordFiles(read_key(config.copy_records_key_file))
        for each in offloads:
            stored = StoredCopies(self._formats, self.record_files)
            records = OffloadRecords(
                self._stored_groups, self._loads.copies, self._observer, stored, self._show_requests
            )
            records.wrap(patches, each)
            hooks.after_launch.append(records.launched)
            self.offloads.append(records)
        if self.stored_in is not None and self.stored_in.place == _STORES[0] and len(offloads) == 1:
            self.stored_in = self.stored_in._replace(shown=self.offloads[0].shown)
        else:
            for records in self.offloads:
                records.shown = False
        for each in disks:
            stored = StoredCopies(self._formats, self.record_files)
            files = DiskRecords(self._groups, self._loads.copies, self._observer, stored)
            files.wrap(patches, each)
            hooks.after_checks.append(files.stores.end_forward)
            self.disks.append(files)
        for each in lmcaches:
            stored = StoredCopies(self._formats, self.record_files, rewritten=True)
            chunks = LmcacheRecords(self._groups, self._loads, self._observer, stored)
            if chunks.wrap(patches, each):
                hooks.after_checks.append(chunks.stores.end_forward)
                self.lmcaches.append(chunks)

    def follow(self, output: Any) -> None:
        """The jobs of a scheduler output, before the runner acts on them."""
        if self.transfers is not None:
            self.transfers.follow(output)
        if self.offloads:
            for records, (metadata, keys) in zip(self.offloads, jobs_of(output), strict=False):
                records.follow(metadata, keys)
        for chunks in self.lmcaches:
            chunks.follow(output)
        for transfers in self.mooncakes:
            transfers.follow(output)

    def close(self) -> None:
        """Write what is still to be written."""
        self.offloads.clear()
        self.disks.clear()
        self.lmcaches.clear()
        self.mooncakes.clear()
        if self.transfers is not None:
            self.transfers.readers.close()
        if self.record_files is not None:
            self.record_files.close()

    def _begin_loads(self) -> None:
        guarded(self._observer, "announce", self._loads.begin_due, self._observer)

    def _formats(self) -> dict[str, int]:
        """By group: format of the records, and the layers and heads that they are made of."""
        found = {}
        for group in self._stored_groups:
            number = self._observer.record_format(group.view.name)
            if number is not None:
                share = [
                    (each.layer, each.part, each.head_start, each.num_heads) for each in group.view.sources
                ]
                described = repr((number, sorted(share))).encode()
                found[group.view.name] = int.from_bytes(blake2b(described, digest_size=7).digest(), "big")
        return found

    def _around_results(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def get_transfer_results(*args: Any, **kwargs: Any) -> Any:
            self._results = original(*args, **kwargs)
            return self._results

        return get_transfer_results

    def _around_errors(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def get_block_ids_with_load_errors(*args: Any, **kwargs: Any) -> Any:
            blocks = original(*args, **kwargs)
            results, self._results = self._results, None
            guarded(self._observer, "announce", self._report, results, blocks or ())
            return blocks

        return get_block_ids_with_load_errors

    def _report(self, results: Any, blocks: Collection[int]) -> None:
        finished = (results.finished_recving if results is not None else None) or ()
        failed = (results.failed_recving if results is not None else None) or ()
        if self.transfers is not None:
            self.transfers.arrived(finished, failed)
        for each in self.mooncakes:
            each.arrived(finished, failed)
            each.left((results.finished_sending if results is not None else None) or ())
        self._loads.reported(finished, failed, blocks, self._observer)
