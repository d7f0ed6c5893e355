"""Scales of quantised KV that vLLM keeps apart from the cache: one per layer, or one per head."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from canary_kernels.buffers import KVSource
from canary_kernels.layout import Part, Plane
from canary_obs.engine_api.observer import Observer
from canary_obs.engine_api.views import GroupView
from canary_obs.engines.vllm.groups import VllmGroup, layer_numbers
from canary_obs.engines.vllm.pool_events import BlockEvent

_QUANTISED = ("fp8", "int8", "fp4")
_PARTS = ((Part.K, "_k_scale"), (Part.V, "_v_scale"))


class KVScales:
    """A group of one slot that no forward shows: all scales of all layers.

    It gets a baseline when the checks begin, and is compared by the patrol. With the prefix cache it is
    reset: an engine whose weights are exchanged may have other scales from then on.
    """

    name = "scale"

    def __init__(self, runner: Any, groups: Sequence[VllmGroup]) -> None:
        names = list(dict.fromkeys(name for group in groups if not group.states for name in group.layers))
        context = runner.compilation_config.static_forward_context
        self._layers = [context[name] for name in names if _keeps_scales(context[name])]
        kept = [name for name in names if _keeps_scales(context[name])]
        numbers = layer_numbers(kept)
        # Kernels on a CPU take copies of the scales that Python holds. On a GPU nothing here could see them.
        self._on_host = runner.device.type == "cpu"
        self._held = torch.zeros((len(kept), len(_PARTS)), dtype=torch.float64)
        sources: list[KVSource] = []
        for row, (name, layer) in enumerate(zip(kept, self._layers, strict=True)):
            for column, (part, attribute) in enumerate(_PARTS):
                sources.append(_source(getattr(layer, attribute), part, numbers[name], Plane.DATA))
                if self._on_host:
                    sources.append(_source(self._held[row, column], part, numbers[name], Plane.SCALES))
        self.sources = tuple(sources)
        self._num_blocks = int(runner.kv_cache_config.num_blocks)
        self._slot = torch.zeros(1, dtype=torch.int64, device=runner.device)
        self.refresh()

    @property
    def views(self) -> list[GroupView]:
        """The group; empty = KV is not quantised."""
        own = GroupView(name=self.name, num_slots=1, page_size=1, sources=self.sources)
        return [own] if self.sources else []

    @property
    def shapes(self) -> dict[str, tuple[int, int, int]]:
        """As CachedBlocks takes it: nothing of the group is cached."""
        return {self.name: (-1, self._num_blocks, 0)} if self.sources else {}

    def refresh(self) -> None:
        """Take up what Python holds of each scale."""
        if not self._on_host:
            return
        held = self._held.numpy()
        for row, layer in enumerate(self._layers):
            for column, (_, attribute) in enumerate(_PARTS):
                held[row, column] = getattr(layer, f"{attribute}_float", 0.0)

    def follow(self, events: Iterable[BlockEvent] | None, observer: Observer) -> None:
        """Before a forward: its kernels take the scales as they are now."""
        if not self.sources:
            return
        self.refresh()
        if any(event is None for event in events or ()):
            observer.received(self.name, self._slot)


def _keeps_scales(layer: Any) -> bool:
    kind = str(getattr(layer, "kv_cache_dtype", ""))
    tensors = all(isinstance(getattr(layer, attribute, None), Tensor) for _, attribute in _PARTS)
    return tensors and any(quantised in kind for quantised in _QUANTISED)


def _source(scales: Tensor, part: Part, layer: int, plane: Plane) -> KVSource:
    size = scales.numel() * scales.element_size()
    return KVSource(
        tensor=scales, part=part, layer=layer, head_start=0, num_heads=1, head_bytes=size, page_size=1,
        page_stride=size, slot_stride=size, head_stride=size, element_bytes=size, element_stride=size,
        plane=plane,
    )  # fmt: skip
