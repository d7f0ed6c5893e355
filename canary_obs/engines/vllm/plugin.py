"""The entry point that vLLM calls in each of its processes; does nothing unless the canary is switched on."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from canary_obs.engines.vllm.seams import Seams

_SWITCHES = ("KV_CANARY_MODE", "KV_CANARY_CONFIG")
_seams: Seams | None = None


def register() -> None:
    """`vllm.general_plugins`: watch the block pools and workers of this process; idempotent.

    Off unless KV_CANARY_MODE or KV_CANARY_CONFIG is set. Raises ConfigurationError for a bad setting.
    An unsupported vLLM is left alone and starts without protection, which is reported.
    """
    global _seams
    if _seams is not None or not any(os.environ.get(name) for name in _SWITCHES):
        return
    from canary_obs.config import CanaryConfig, load
    from canary_obs.records import Mode

    config = load(CanaryConfig)
    if config.mode is Mode.NONE:
        return
    from canary_obs.engines.vllm.seams import Seams

    _seams = Seams()
    _watch(_seams)


def unregister() -> None:
    """Take every class-level wrapper out again; workers attached meanwhile keep theirs."""
    global _seams
    if _seams is not None:
        _seams.restore()
        _seams = None


def _watch(seams: Seams) -> None:
    import vllm

    from canary_obs.engines.vllm.block_events import watch_pools
    from canary_obs.engines.vllm.refusal import refuse
    from canary_obs.engines.vllm.versions import check_seams, check_version
    from canary_obs.errors import UnsupportedEngine

    try:
        check_version(str(vllm.__version__))
        check_seams()
    except UnsupportedEngine as error:
        refuse(str(error))
        return
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    watch_pools(seams)
    seams.wrap(WorkerWrapperBase, "init_worker", _init_worker)


def _init_worker(original: Callable[..., Any]) -> Callable[..., Any]:
    def init_worker(wrapper: Any, all_kwargs: Any) -> Any:
        from canary_obs.engines.vllm.worker import protect_when_ready

        result = original(wrapper, all_kwargs)
        protect_when_ready(wrapper.worker)
        return result

    return init_worker
