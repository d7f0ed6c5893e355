"""Nothing in vLLM goes on calling a method as it was before the canary wrapped it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

from tests.engines.taken_methods import taken_before
from tests.engines.vllm.real.offloading import Tiers
from tests.engines.vllm.real.rig import prompts


def test_nothing_holds_a_method_as_it_was(make_rig: Any) -> None:
    rig = make_rig()
    rig.generate(prompts(2), 3)
    patches = rig.adapter._patches
    assert taken_before(patches) == set()
    owner, name, _ = patches._replaced[0]
    held = [MethodType(getattr(type(owner), name), owner)]
    assert taken_before(patches) == {(type(owner).__name__, name)}, "it would be found"
    assert held


def test_nor_a_connectors(models: Callable[[str], Path], tmp_path: Path) -> None:
    tiers = Tiers(models("llama"), tmp_path)
    try:
        tiers.rig.generate(prompts(2), 3)
        assert taken_before(tiers.rig.adapter._patches) == set()
    finally:
        tiers.rig.close()
