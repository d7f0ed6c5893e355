"""Which adapter protects which of vLLM's model runners."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from canary_obs.engines.toolkit.method_patches import MethodPatches
from canary_obs.engines.vllm.adapter import VllmAdapter
from canary_obs.engines.vllm.runner_v1 import V1Adapter
from canary_obs.engines.vllm.runner_v2 import V2Adapter
from canary_obs.errors import UnsupportedEngine

RUNNERS: dict[str, type[VllmAdapter]] = {
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner": V1Adapter,
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner": V2Adapter,
}


def adapter_for_runner(
    runner: Any,
    *,
    worker: Any = None,
    wrap_engine: Callable[[MethodPatches], None] | None = None,
    fresh: bool = False,
) -> VllmAdapter:
    """A new adapter of an initialised model runner, see VllmAdapter. Raises UnsupportedEngine."""
    names = {f"{base.__module__}:{base.__qualname__}" for base in type(runner).__mro__}
    for name, adapter in RUNNERS.items():
        if name in names:
            return adapter(runner, worker=worker, wrap_engine=wrap_engine, fresh=fresh)
    raise UnsupportedEngine(
        f"unknown vLLM model runner {type(runner).__module__}.{type(runner).__qualname__}; "
        f"supported are {', '.join(RUNNERS)} and their subclasses"
    )
