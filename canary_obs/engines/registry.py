"""Which adapter protects which engine. Known by name, so that none is imported for another."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, cast

from canary_obs.errors import UnsupportedEngine

if TYPE_CHECKING:
    from canary_obs.engine_api.adapter import EngineAdapter

# Engine class -> adapter class, each as module:name.
ADAPTERS = {
    "canary_obs.reference_engine.engine:Engine": "canary_obs.engines.reference.adapter:ReferenceAdapter",
}


def adapter_for(engine: object) -> EngineAdapter:
    """The adapter of an engine, not attached yet. Raises UnsupportedEngine for an unknown type."""
    for kind in type(engine).__mro__:
        if path := ADAPTERS.get(f"{kind.__module__}:{kind.__qualname__}"):
            module, name = path.split(":")
            return cast("EngineAdapter", getattr(import_module(module), name)(engine))
    found = f"{type(engine).__module__}:{type(engine).__qualname__}"
    raise UnsupportedEngine(
        f"no adapter for an engine of type {found}; supported types are {', '.join(sorted(ADAPTERS))}. "
        "Pass one of these, or an object that implements canary_obs.engine_api.adapter.EngineAdapter"
    )
