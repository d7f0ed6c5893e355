"""Catches silent KV-cache corruption inside running LLM inference engines. Names load on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from canary_obs.attach import install_canary
    from canary_obs.config import CanaryConfig, ServiceConfig
    from canary_obs.errors import KVCacheViolation
    from canary_obs.serve import serve

__all__ = ["CanaryConfig", "KVCacheViolation", "ServiceConfig", "__version__", "install_canary", "serve"]
__version__ = "0.2.0.dev0"

_HOMES = {
    "CanaryConfig": "canary_obs.config",
    "ServiceConfig": "canary_obs.config",
    "KVCacheViolation": "canary_obs.errors",
    "install_canary": "canary_obs.attach",
    "serve": "canary_obs.serve",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'canary_obs' has no attribute {name!r}; it offers {sorted(__all__)}")
    return getattr(import_module(_HOMES[name]), name)
