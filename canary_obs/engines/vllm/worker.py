"""Puts the canary into a vLLM worker once its warm-up is over, and takes it out at shutdown."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import msgspec
import torch

from canary_obs.config import CanaryConfig, load
from canary_obs.engines.toolkit.method_patches import MethodPatches
from canary_obs.engines.toolkit.refusal import Refusal
from canary_obs.engines.toolkit.service_process import start_service, stop_service
from canary_obs.engines.vllm.adapter import VllmAdapter
from canary_obs.engines.vllm.runner_v1 import V1Adapter
from canary_obs.engines.vllm.runner_v2 import V2Adapter
from canary_obs.errors import UnsupportedEngine
from canary_obs.runtime.canary import CanaryRuntime
from canary_obs.vocabulary import Mode

log = logging.getLogger("canary_obs")
RUNNERS: dict[str, type[VllmAdapter]] = {
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner": V1Adapter,
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner": V2Adapter,
}
_PROTECTION = "kv_canary"  # attribute of the worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Protection:
    """What was put beside a worker: a canary, or the word that there is none."""

    runtime: CanaryRuntime | None
    adapter: VllmAdapter | None
    refusal: Refusal | None
    service: subprocess.Popen[bytes] | None


def follow_life(worker: Any, unsupported: str | None) -> None:
    """Attach after warm-up and after each wake-up, detach before sleep and shutdown; idempotent.

    With a reason not to attach, that is reported instead.
    """
    if "compile_or_warm_up_model" in vars(worker):
        return
    patches = MethodPatches()

    def begin(original: Callable[..., Any]) -> Callable[..., Any]:
        def method(*given: Any, **named: Any) -> Any:
            result = original(*given, **named)
            tags = named.get("tags", given[0] if given else None)
            if tags is None or "kv_cache" in tags:
                protect(worker, unsupported)
            return result

        return method

    def end(original: Callable[..., Any]) -> Callable[..., Any]:
        def method(*given: Any, **named: Any) -> Any:
            release(worker)
            return original(*given, **named)

        return method

    def last(original: Callable[..., Any]) -> Callable[..., Any]:
        def method(*given: Any, **named: Any) -> Any:
            release(worker)
            patches.restore()
            return original(*given, **named)

        return method

    patches.wrap(worker, "compile_or_warm_up_model", begin)
    patches.wrap(worker, "wake_up", begin)
    # A sleeping worker's KV memory is unmapped: nothing may read it.
    patches.wrap(worker, "sleep", end)
    patches.wrap(worker, "shutdown", last)


def protect(worker: Any, unsupported: str | None = None) -> None:
    """Attach to a worker whose KV cache is initialised; a worker that cannot be protected is reported."""
    release(worker)
    config = load(CanaryConfig)
    if config.mode is Mode.NONE:
        return
    config = msgspec.structs.replace(config, rank=rank_of(worker))
    service = start_service(config)
    runtime: CanaryRuntime | None = None
    adapter: VllmAdapter | None = None
    refusal: Refusal | None = None
    try:
        if unsupported is not None:
            raise UnsupportedEngine(unsupported)
        # Tensors made under inference mode could not be changed outside of it.
        with torch.inference_mode(False), torch.no_grad():
            # By name: the door stands above the engines, and here vLLM comes in from below.
            install_canary = import_module("canary_obs.attach").install_canary
            adapter = adapter_of(worker.model_runner)
            runtime = install_canary(adapter, config)
            if runtime is not None:
                runtime.mark_ready()
    except Exception as error:
        if config.mode is Mode.RAISE and not isinstance(error, UnsupportedEngine):
            raise
        if not isinstance(error, UnsupportedEngine):
            log.exception("canary_obs: could not be attached")
        refusal = Refusal(str(error) or type(error).__name__, config, engine_version())
    keep_modules_readable()
    vars(worker)[_PROTECTION] = Protection(runtime=runtime, adapter=adapter, refusal=refusal, service=service)


def release(worker: Any) -> None:
    """Detach a worker's canary; idempotent."""
    protection = vars(worker).pop(_PROTECTION, None)
    if protection is None:
        return
    if protection.runtime is not None:
        protection.runtime.detach()
    if protection.refusal is not None:
        protection.refusal.close()
    if protection.service is not None:
        stop_service(protection.service)


def keep_modules_readable() -> None:
    """Let another vLLM engine start in this process after numba was loaded here; idempotent.

    vLLM's CPU platform asks every attribute of every module for `__dict__`. llvmlite's library object takes
    any name for a function of the library, and what it answers ends that engine's start.
    """
    ffi = sys.modules.get("llvmlite.binding.ffi")
    if ffi is not None and hasattr(ffi.lib, "_fntab"):
        ffi.lib._fntab.setdefault("__dict__", {})


def runtime_of(worker: Any) -> CanaryRuntime | None:
    """The canary of a worker; None when it has none."""
    protection: Protection | None = vars(worker).get(_PROTECTION)
    return protection.runtime if protection else None


def attached_adapter(worker: Any) -> VllmAdapter:
    """Through which a worker's canary sees it. Raises UnsupportedEngine when it has none."""
    protection: Protection | None = vars(worker).get(_PROTECTION)
    if protection is None or protection.runtime is None or protection.adapter is None:
        raise UnsupportedEngine("this worker is not protected; its log says why")
    return protection.adapter


def engine_version() -> str:
    """vLLM's."""
    import vllm

    return str(vllm.__version__)


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
