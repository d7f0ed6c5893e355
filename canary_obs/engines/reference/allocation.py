"""What KV the reference engine has: its pool's memory, and the layers of its model's shape."""

from __future__ import annotations

from canary_obs.engine_api.views import KVAllocation
from canary_obs.engines.reference.draft_group import DRAFT
from canary_obs.engines.reference.full_group import FULL
from canary_obs.engines.reference.swa_group import SWA
from canary_obs.reference_engine.engine import Engine


def allocation(engine: Engine) -> KVAllocation:
    """Nothing here is read from what the adapter shows."""
    shape = engine.config.shape if engine.config.checkpoint is None else engine.runner.model.shape
    windowed = sum(window is not None for window in shape.windows)
    layers: dict[tuple[str, ...], int] = {(FULL,): shape.layers - windowed}
    if windowed:
        layers[(SWA,)] = windowed
    if shape.sparse is not None:
        layers[("indexer",)] = shape.layers
    if shape.compressed is not None:
        for ratio in shape.compressed.ratios:
            names = [f"c{ratio}", f"c{ratio}_state"]
            names += [f"c{ratio}_indexer"] if ratio == shape.compressed.indexed else []
            for name in names:
                layers[(name,)] = layers.get((name,), 0) + 1
    size = engine.runner.pool.nbytes
    if engine.drafter is not None:
        size += engine.drafter.runner.pool.nbytes
        layers[(DRAFT,)] = engine.config.draft_layers
    return KVAllocation(bytes=size, layers=layers)
