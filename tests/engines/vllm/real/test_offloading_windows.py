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
        assert tiers.rig.settle() == []
        loads = tiers.loads_by_group()
        assert loads["full"][0] > 200
        assert loads["full"][1] == 0
        # Blocks that had left the window when their chunk was stored have no records.
        assert loads["swa"][0] > 0
    finally:
        tiers.rig.close()
