"""The group of scales kept apart from the cache; with a real engine: real/test_scales.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from canary_obs.engines.vllm.scales import KVScales


def layer(kind: str = "fp8_e4m3", heads: int = 1) -> Any:
    return SimpleNamespace(
        kv_cache_dtype=kind, _k_scale=torch.ones(heads), _v_scale=torch.ones(heads),
        _k_scale_float=1.0, _v_scale_float=1.0,
    )  # fmt: skip


def scales(device: str = "cpu", **layers: Any) -> KVScales:
    runner = SimpleNamespace(
        kv_cache_config=SimpleNamespace(num_blocks=16),
        device=torch.device(device),
        compilation_config=SimpleNamespace(static_forward_context=layers),
    )
    group = SimpleNamespace(layers=tuple(layers), states=False)
    return KVScales(runner, [group, SimpleNamespace(layers=("state",), states=True)])  # type: ignore[list-item]


def test_every_scale_of_quantised_layers_has_a_source() -> None:
    found = scales(a=layer(heads=2), b=layer())
    assert [view.num_slots for view in found.views] == [1]
    assert found.shapes == {"scale": (-1, 16, 0)}
    by_part = [
        (source.part.name, source.plane.name, source.layer, source.slot_bytes) for source in found.sources
    ]
    assert by_part == [
        ("K", "DATA", 0, 8), ("K", "SCALES", 0, 8), ("V", "DATA", 0, 8), ("V", "SCALES", 0, 8),
        ("K", "DATA", 1, 4), ("K", "SCALES", 1, 8), ("V", "DATA", 1, 4), ("V", "SCALES", 1, 8),
    ]  # fmt: skip


def test_kv_that_is_not_quantised_has_no_group() -> None:
    found = scales(a=layer("auto"), b=SimpleNamespace())
    assert (found.views, found.shapes) == ([], {})


def test_what_python_holds_is_taken_up_before_each_forward() -> None:
    own, seen = layer(), []
    found = scales(a=own)
    held = found.sources[3].tensor
    own._v_scale_float = 3.5
    assert float(held) == 1.0
    found.follow((), SimpleNamespace(received=lambda *given: seen.append(given)))  # type: ignore[arg-type]
    assert float(held) == 3.5
    assert seen == []
    found.follow((4, None), SimpleNamespace(received=lambda *given: seen.append(given)))  # type: ignore[arg-type]
    ((name, slots),) = seen
    assert (name, slots.tolist()) == ("scale", [0])
