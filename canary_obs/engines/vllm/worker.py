"""Puts the canary into a vLLM worker once its warm-up is over, and takes it out at shutdown."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from canary_obs.attach import install_canary
from canary_obs.config import CanaryConfig, load
from canary_obs.engines.vllm.adapter import VllmAdapter
from canary_obs.engines.vllm.refusal import refuse
from canary_obs.engines.vllm.runner_v1 import V1Adapter
from canary_obs.engines.vllm.runner_v2 import V2Adapter
from canary_obs.engines.vllm.seams import Seams
from canary_obs.errors import UnsupportedEngine
from canary_obs.runtime.canary import CanaryRuntime

log = logging.getLogger("canary_obs")
RUNNERS: dict[str, type[VllmAdapter]] = {
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner": V1Adapter,
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner": V2Adapter,
}
_RUNTIME = "kv_canary"  # attribute of the worker


def protect_when_ready(worker: Any) -> None:
    """Attach after the worker's warm-up, detach at its shutdown."""
    seams = Seams()

    def after_warm_up(original: Callable[..., Any]) -> Callable[..., Any]:
        def compile_or_warm_up_model(*given: Any, **named: Any) -> Any:
            result = original(*given, **named)
            protect(worker)
            return result

        return compile_or_warm_up_model

    def before_shutdown(original: Callable[..., Any]) -> Callable[..., Any]:
        def shutdown(*given: Any, **named: Any) -> Any:
            release(worker)
            seams.restore()
            return original(*given, **named)

        return shutdown

    seams.wrap(worker, "compile_or_warm_up_model", after_warm_up)
    seams.wrap(worker, "shutdown", before_shutdown)


def protect(worker: Any) -> None:
    """Attach to a worker whose KV cache is initialised; a worker that cannot be protected is reported."""
    release(worker)
    config = load(CanaryConfig)
    config = msgspec.structs.replace(config, rank=rank_of(worker))
    try:
        # Tensors made under inference mode could not be changed outside of it.
        with torch.inference_mode(False), torch.no_grad():
            runtime = install_canary(adapter_of(worker.model_runner), config)
            if runtime is not None:
                runtime.mark_ready()
    except UnsupportedEngine as error:
        refuse(str(error), config)
        return
    setattr(worker, _RUNTIME, runtime)


def release(worker: Any) -> None:
    """Detach a worker's canary; idempotent."""
    runtime = runtime_of(worker)
    if runtime is not None:
        delattr(worker, _RUNTIME)
        runtime.detach()


def runtime_of(worker: Any) -> CanaryRuntime | None:
    """The canary of a worker; None when it has none."""
    runtime: CanaryRuntime | None = vars(worker).get(_RUNTIME)
    return runtime


def adapter_of(runner: Any) -> VllmAdapter:
    """The adapter of a model runner. Raises UnsupportedEngine."""
    kinds = {f"{kind.__module__}:{kind.__qualname__}" for kind in type(runner).__mro__}
    for name, adapter in RUNNERS.items():
        if name in kinds:
            return adapter(runner)
    raise UnsupportedEngine(
        f"vLLM's model runner {type(runner).__module__}.{type(runner).__qualname__} is not known; "
        f"supported are {', '.join(RUNNERS)}"
    )


def rank_of(worker: Any) -> int:
    """One number per worker of the whole deployment: data parallel replicas follow one another."""
    parallel = worker.vllm_config.parallel_config
    return int(parallel.data_parallel_index) * int(parallel.world_size) + int(worker.rank)
