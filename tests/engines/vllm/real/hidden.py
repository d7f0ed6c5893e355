"""Layers and bytes of a real vLLM that the adapter does not show: what the canary says."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from canary_kernels.layout import Part
from canary_obs.engines.vllm import groups
from canary_obs.engines.vllm.worker import attach_to_worker, detach_from_worker
from tests.engines.vllm.real.forwards import replaced
from tests.engines.vllm.real.rig import Rig

LAYERS, BYTES = "layers with KV in", "of KV bytes protected, target"


def _without_a_layer(sources: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(source for source in sources if source.layer != sources[0].layer)


def _without_values(sources: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(source for source in sources if source.part is not Part.V)


WAYS: dict[str, tuple[Callable[[tuple[Any, ...]], tuple[Any, ...]], str]] = {
    "the adapter hides a layer": (_without_a_layer, LAYERS),
    "the adapter hides V": (_without_values, BYTES),
}


def tried(rig: Rig) -> dict[str, dict[str, Any]]:
    """Of every way: the verdict after attaching once more, and the coverage."""
    report: dict[str, dict[str, Any]] = {}
    shown = groups._sources
    for way, (hide, names) in WAYS.items():
        detach_from_worker(rig.worker)

        def hiding(*given: Any, hide: Any = hide) -> tuple[Any, ...]:
            sources, refused = shown(*given)
            return hide(sources), refused

        with replaced(groups, "_sources", hiding):
            started = time.monotonic()
            attach_to_worker(rig.worker)
        rig.collect_from()
        state, reasons = rig.canary.verdict()
        report[way] = {
            "state": str(state), "reasons": list(reasons), "seconds": time.monotonic() - started,
            "names": names, "coverage": rig.canary.state.coverage,
        }  # fmt: skip
    detach_from_worker(rig.worker)
    attach_to_worker(rig.worker)
    rig.collect_from()
    report["shown"] = {"coverage": rig.canary.state.coverage, "reasons": list(rig.canary.verdict()[1])}
    return report
