"""Follows what a worker's KV connector reports of its loads: complete, failed, blocks that are missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from canary_obs.engine_api.observer import Observer
from canary_obs.engines.toolkit.method_patches import MethodPatches
from canary_obs.engines.vllm.connector_loads import ConnectorLoads


def worker_connector() -> Any:
    """The KV connector of the worker of this process; None = it has none."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    return get_kv_transfer_group() if has_kv_transfer_group() else None


class ConnectorReports:
    """Wraps the two methods by which a model runner asks its connector; any connector has both."""

    def __init__(self, loads: ConnectorLoads, observer: Observer) -> None:
        self._loads, self._observer = loads, observer
        self._results: Any = None  # of `get_transfer_results`, until the failed blocks are known as well

    def wrap(self, patches: MethodPatches, connector: Any) -> None:
        """Follow this connector, and what is inside of it, until `patches` are restored."""
        patches.wrap(connector, "get_transfer_results", self._around_results)
        patches.wrap(connector, "get_block_ids_with_load_errors", self._around_errors)

    def _around_results(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def get_transfer_results(*args: Any, **kwargs: Any) -> Any:
            self._results = original(*args, **kwargs)
            return self._results

        return get_transfer_results

    def _around_errors(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def get_block_ids_with_load_errors(*args: Any, **kwargs: Any) -> Any:
            blocks = original(*args, **kwargs)
            results, self._results = self._results, None
            try:
                finished = results.finished_recving if results is not None else ()
                failed = results.failed_recving if results is not None else ()
                self._loads.reported(finished, failed, blocks or (), self._observer)
            except Exception as error:  # noqa: BLE001 - a fault of the canary must not reach the engine
                self._observer.fault("announce", error)
            return blocks

        return get_block_ids_with_load_errors
