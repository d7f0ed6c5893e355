"""Attaches a canary to a vLLM worker after its warm-up, and detaches it at shutdown."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import torch

from canary_obs.config import CanaryConfig, load
from canary_obs.engines.toolkit.attachment import protect
from canary_obs.engines.toolkit.method_patches import MethodPatches
from canary_obs.engines.toolkit.server_number import separate
from canary_obs.engines.toolkit.service_process import SupervisedService, start_service
from canary_obs.engines.vllm.adapter import VllmAdapter
from canary_obs.engines.vllm.model_runners import adapter_for_runner
from canary_obs.engines.vllm.readable_modules import keep_modules_readable
from canary_obs.engines.vllm.rehearsal import rehearse
from canary_obs.errors import ConfigurationError, UnsupportedEngine
from canary_obs.records import Snapshot
from canary_obs.runtime.canary import CanaryRuntime
from canary_obs.runtime.refusal import Refusal
from canary_obs.runtime.untried import check_untried
from canary_obs.vocabulary import Mode

log = logging.getLogger("canary_obs")
_ATTRIBUTE = "kv_canary"  # of the worker: its WorkerCanary
_REHEARSED = "kv_canary_rehearsal"  # of the worker: what is to be said of its rehearsal


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCanary:
    """What a worker was given: a canary and its adapter, or a refusal that reports why not."""

    runtime: CanaryRuntime | None
    adapter: VllmAdapter | None
    refusal: Refusal | None
    service: SupervisedService | None


def wrap_lifecycle(worker: Any, unsupported: str | None) -> None:
    """Attach after warm-up and after each wake-up, detach before sleep and shutdown; idempotent.

    `unsupported`: a reason not to attach, which is reported instead.
    """
    if "compile_or_warm_up_model" in vars(worker):
        return
    patches = MethodPatches()

    def attach_after(original: Callable[..., Any]) -> Callable[..., Any]:
        def method(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            tags = kwargs.get("tags", args[0] if args else None)  # of wake_up: None = all memory
            if tags is None or "kv_cache" in tags:
                attach_to_worker(worker, unsupported)
            return result

        return method

    def detach_before(original: Callable[..., Any]) -> Callable[..., Any]:
        def method(*args: Any, **kwargs: Any) -> Any:
            detach_from_worker(worker)
            return original(*args, **kwargs)

        return method

    def restore_before(original: Callable[..., Any]) -> Callable[..., Any]:
        def method(*args: Any, **kwargs: Any) -> Any:
            detach_from_worker(worker)
            patches.restore()
            return original(*args, **kwargs)

        return method

    patches.wrap(worker, "compile_or_warm_up_model", attach_after)
    patches.wrap(worker, "wake_up", attach_after)
    # The KV memory of a sleeping worker is unmapped: nothing may read it.
    patches.wrap(worker, "sleep", detach_before)
    patches.wrap(worker, "shutdown", restore_before)


def attach_to_worker(worker: Any, unsupported: str | None = None) -> None:
    """Attach to a worker whose KV cache is initialised and empty.

    A worker that cannot be protected keeps running; the reason is logged and reported to the service.
    """
    detach_from_worker(worker)
    config = load(CanaryConfig)
    if config.mode is Mode.NONE:
        return
    parallel, local = worker.vllm_config.parallel_config, config.endpoint.startswith("ipc://")
    expected = config.expected_ranks or expected_ranks(parallel, local=local)
    config = msgspec.structs.replace(config, rank=rank_of(worker), expected_ranks=expected)
    config, port = separate(config, str(worker.vllm_config.instance_id), own_part(worker))
    service = start_service(config, port)
    runtime: CanaryRuntime | None = None
    adapter: VllmAdapter | None = None
    refusal: Refusal | None = None
    try:
        if unsupported is not None:
            raise UnsupportedEngine(unsupported)
        # Worker methods run in inference mode; tensors created there could not be changed outside of it.
        with torch.inference_mode(False), torch.no_grad():
            adapter = _fresh_adapter(worker)
            if adapter.untried is not None:
                check_untried(adapter.untried, config)
                adapter.untried += f"; {_rehearsed(worker, config)}"
            runtime = protect(adapter, config)
    except Exception as error:
        plain = isinstance(error, UnsupportedEngine | ConfigurationError)  # its message says it all
        if config.mode is Mode.RAISE and not isinstance(error, UnsupportedEngine):
            raise
        if not plain:
            log.exception("canary_obs: could not be attached")
        refusal = Refusal(str(error) or type(error).__name__, config, ("vllm", engine_version()))
    keep_modules_readable()
    vars(worker)[_ATTRIBUTE] = WorkerCanary(
        runtime=runtime, adapter=adapter, refusal=refusal, service=service
    )


def _fresh_adapter(worker: Any) -> VllmAdapter:
    return adapter_for_runner(worker.model_runner, worker=worker, fresh=True)


def _rehearsed(worker: Any, config: CanaryConfig) -> str:
    """What a rehearsal of this worker found, the first time it was attached to."""
    found: str | None = vars(worker).get(_REHEARSED)
    if found is None:  # a worker that wakes up may have blocks that are cached
        found = rehearse(worker, config, partial(_fresh_adapter, worker))
        vars(worker)[_REHEARSED] = found
    return found


def detach_from_worker(worker: Any) -> Snapshot | None:
    """Detach a worker's canary, or end its refusal; stop the service it started. Idempotent.

    Returns the canary's last snapshot; None = there was no canary.
    """
    given: WorkerCanary | None = vars(worker).pop(_ATTRIBUTE, None)
    if given is None:
        return None
    final = None if given.runtime is None else given.runtime.detach()
    if given.refusal is not None:
        given.refusal.close()
    if given.service is not None:
        given.service.stop()
    return final


def canary_of(worker: Any) -> WorkerCanary | None:
    """What `attach_to_worker` gave a worker; None = nothing."""
    given: WorkerCanary | None = vars(worker).get(_ATTRIBUTE)
    return given


def runtime_of(worker: Any) -> CanaryRuntime | None:
    """The canary of a worker; None = it is not protected."""
    given = canary_of(worker)
    return given.runtime if given else None


def attached_adapter(worker: Any) -> VllmAdapter:
    """The adapter of a worker's canary. Raises UnsupportedEngine when it has none."""
    given = canary_of(worker)
    if given is None or given.runtime is None or given.adapter is None:
        raise UnsupportedEngine("this worker is not protected; its log names the reason")
    return given.adapter


def engine_version() -> str:
    """The installed vLLM's version."""
    import vllm

    return str(vllm.__version__)


def rank_of(worker: Any) -> int:
    """The worker's number in the whole deployment, data-parallel replicas counted one after another."""
    parallel = worker.vllm_config.parallel_config
    return int(parallel.data_parallel_index) * int(parallel.world_size) + int(worker.rank)


def own_part(worker: Any) -> str:
    """Which part of an instance this server is, where each of its ranks is started by itself; else empty."""
    parallel = worker.vllm_config.parallel_config
    if parallel.distributed_executor_backend == "external_launcher":
        return f"-rank{rank_of(worker)}"
    if parallel.data_parallel_external_lb:
        return f"-replica{parallel.data_parallel_index}"
    return ""


def expected_ranks(parallel: Any, *, local: bool) -> str:
    """The ranks that report to one service, as KV_CANARY_EXPECTED_RANKS has it.

    `local`: the service serves one host, and so hears that host's ranks only.
    """
    world, replicas, first = int(parallel.world_size), int(parallel.data_parallel_size), 0
    total = world * replicas
    if local:
        first = (int(parallel.data_parallel_index) - int(parallel.data_parallel_rank_local or 0)) * world
        total = int(parallel.data_parallel_size_local) * world
        if (nodes := int(parallel.nnodes)) > 1:  # one replica spread over hosts
            total = world // nodes
            first = int(parallel.data_parallel_index) * world + int(parallel.node_rank) * total
    return f"{first}-{first + total - 1}"
