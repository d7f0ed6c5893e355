"""Catches silent KV-cache corruption inside running LLM inference engines."""

from __future__ import annotations

from importlib import import_module
from typing import Any

# Loaded on first use: `import canary_obs` loads neither torch nor msgspec. Types are in __init__.pyi.
_MODULES = {
    "CachedCount": "canary_obs.engine_api.views",
    "CachedSlots": "canary_obs.engine_api.views",
    "ComparedTables": "canary_obs.engine_api.views",
    "CanaryConfig": "canary_obs.config",
    "ConfigurationError": "canary_obs.errors",
    "EngineAdapter": "canary_obs.engine_api.adapter",
    "GroupStep": "canary_obs.engine_api.views",
    "GroupView": "canary_obs.engine_api.views",
    "KVAllocation": "canary_obs.engine_api.views",
    "KVCacheViolation": "canary_obs.errors",
    "Mode": "canary_obs.vocabulary",
    "Observer": "canary_obs.engine_api.observer",
    "PrefixCache": "canary_obs.engine_api.adapter",
    "ServiceConfig": "canary_obs.config",
    "StepTypes": "canary_obs.engine_api.views",
    "StepView": "canary_obs.engine_api.views",
    "UnsupportedEngine": "canary_obs.errors",
    "install_canary": "canary_obs.attach",
    "serve": "canary_obs.serve",
}

__all__ = [
    "CachedCount",
    "CachedSlots",
    "CanaryConfig",
    "ComparedTables",
    "ConfigurationError",
    "EngineAdapter",
    "GroupStep",
    "GroupView",
    "KVAllocation",
    "KVCacheViolation",
    "Mode",
    "Observer",
    "PrefixCache",
    "ServiceConfig",
    "StepTypes",
    "StepView",
    "UnsupportedEngine",
    "__version__",
    "install_canary",
    "serve",
]
__version__ = "0.2.0.dev0"


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'canary_obs' has no attribute {name!r}; it offers {sorted(__all__)}")
    return getattr(import_module(_MODULES[name]), name)
