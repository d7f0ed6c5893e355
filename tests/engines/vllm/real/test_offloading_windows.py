"""OffloadingConnector with sliding windows, and chunks of several blocks; an engine of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.engines.vllm.real.offloading import Tiers
from tests.engines.vllm.real.rig import prompts


def test_windows_and_chunks_of_several_blocks(models: Callable[[str], Path], tmp_path: Path) -> None:
    tiers = Tiers(models("gemma3"), tmp_path, per_chunk=2)
    try:
        asked = prompts(8)
        first = tiers.rig.generate(asked, 12)
        tiers.settle()
        tiers.forget(memory=True)
        assert tiers.rig.generate(asked, 12) == first
        compared, left_out = tiers.loads()
        assert compared > 200
        assert left_out == 0
        assert tiers.rig.settle() == []
    finally:
        tiers.rig.close()
