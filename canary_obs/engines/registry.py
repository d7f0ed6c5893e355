"""Which adapter protects which engine. By name, so that no engine is imported to recognise another."""

from __future__ import annotations

from importlib import import_module
from typing import cast

from canary_obs.engine_api.adapter import EngineAdapter
from canary_obs.errors import UnsupportedEngine

_VLLM_RUNNER = "canary_obs.engines.vllm.model_runners:adapter_for_runner"

# Class of the engine -> function or class that makes its adapter, each as module:name. Subclasses count.
ADAPTERS = {
    "canary_obs.reference_engine.engine:Engine": "canary_obs.engines.reference.adapter:ReferenceAdapter",
    "sglang.srt.managers.scheduler:Scheduler": "canary_obs.engines.sglang.adapter:SglangAdapter",
    "vllm.entrypoints.llm:LLM": "canary_obs.engines.vllm.in_process:adapter_for_llm",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner": _VLLM_RUNNER,
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner": _VLLM_RUNNER,
}


def adapter_for(engine: object) -> EngineAdapter:
    """A new adapter of an engine, not attached. Raises UnsupportedEngine."""
    for base in type(engine).__mro__:
        if path := ADAPTERS.get(f"{base.__module__}:{base.__qualname__}"):
            module, name = path.split(":")
            return cast("EngineAdapter", getattr(import_module(module), name)(engine))
    found = f"{type(engine).__module__}:{type(engine).__qualname__}"
    raise UnsupportedEngine(
        f"no adapter for an engine of type {found}; supported types are {', '.join(sorted(ADAPTERS))}. "
        "Pass one of these, or a subclass of canary_obs.EngineAdapter for an engine of your own"
    )
