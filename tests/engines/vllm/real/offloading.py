"""An engine that offloads its KV to memory and files, with access to its tiers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from canary_obs.runtime.report.snapshot import group_counters
from canary_obs.vocabulary import Phase, Reason
from tests.engines.vllm.real.rig import Rig, prompts

PROMPT = prompts(1, shared=230)[0][:230]
BLOCKS = 7  # of the prompt, full ones


class Tiers:
    """An engine that offloads, and what its tiers hold."""

    def __init__(self, model: Path, files: Path, **how: Any) -> None:
        from tests.engines.vllm.real.host_offload import COPIES, transfer_config

        self.copies, self.folder = COPIES, files
        config = transfer_config(files, how.pop("per_chunk", 1))
        self.rig = Rig(model, num_gpu_blocks_override=60, kv_transfer_config=config, **how)
        self.connector = self.rig.core.scheduler.connector

    def loads(self) -> tuple[int, int]:
        """Slots of loads that were compared with what was stored, and that were not."""
        compared, left_out = zip(*self.loads_by_group().values(), strict=True)
        return sum(compared), sum(left_out)

    def loads_by_group(self) -> dict[str, tuple[int, int]]:
        """The same of each group."""
        self.rig.settle()
        groups = group_counters(self.rig.canary.state, self.rig.canary.counter_reader)
        return {name: (counters.loads_compared, counters.loads_left_out) for name, counters in groups.items()}

    def settle(self) -> None:
        """Stores are submitted a step later, and written to files by threads: let them."""
        for _ in range(3):
            self.rig.generate(prompts(1, seed=77, shared=0), 2)
        record_files = self.rig.adapter.connector.record_files
        assert record_files is not None
        record_files.settle()
        for tier in self.connector.connector_scheduler.manager.secondary_tiers:
            tier.drain_jobs()
        self.rig.generate(prompts(1, seed=77, shared=0), 2)

    def forget(self, *, memory: bool = False) -> None:
        """Lose what the device holds, and what the memory tier does: it comes back from files."""
        assert self.rig.llm.reset_prefix_cache()
        self.rig.generate(prompts(8, seed=4), 2)
        self.settle()
        assert self.rig.llm.reset_prefix_cache()
        if memory:
            self.connector.reset_cache()

    def files(self) -> list[Path]:
        """Of the tier."""
        return sorted(self.folder.rglob("*.bin"))

    def loaded(self, fault: Callable[[Tiers], None], *, memory: bool = False) -> set[tuple[Phase, Reason]]:
        """Serve a prompt, lose its blocks, do something, and serve it again: what was found, how often."""
        self.forget(memory=True)
        for file in self.folder.rglob("*.bin*"):
            file.unlink()
        self.rig.generate([PROMPT], 2)
        self.settle()
        self.forget(memory=memory)
        self.rig.settle()
        self.rig.found.clear()
        before = self.loads()
        fault(self)
        self.rig.generate([PROMPT], 2)
        self.rig.settle()
        self.copies.skip, self.copies.late = False, None
        compared, left_out = self.loads()
        self.compared, self.left_out = compared - before[0], left_out - before[1]
        return set(self.rig.reasons())
