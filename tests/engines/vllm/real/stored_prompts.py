"""An engine whose connector stores prompts, which are served once more from there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Self

from canary_obs.runtime.report.snapshot import group_counters
from canary_obs.vocabulary import Phase, Reason
from tests.engines.vllm.real.rig import Rig, prompts

DATA, LOST = (Phase.HEAD, Reason.KV_DATA), (Phase.HEAD, Reason.LOST_LOAD)
LENGTH = 230  # of a prompt: seven blocks and a part of the eighth, which no connector keeps


class StoredPrompts(ABC):
    """What differs is where the connector keeps them, and how they are lost."""

    compared = left_out = 0  # slots of the loads that `served` has seen

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self._seed = 500

    def prompt(self) -> list[int]:
        """One that nobody has seen."""
        self._seed += 1
        return prompts(1, seed=self._seed, shared=LENGTH)[0][:LENGTH]

    def settle(self) -> None:
        """Threads write files: let them."""
        files = self.rig.adapter.connector.record_files
        assert files is not None
        files.settle()

    def forget(self) -> None:
        """What the device holds; another prompt has used its blocks since."""
        assert self.rig.llm.reset_prefix_cache()
        self.rig.generate(prompts(8, seed=4), 2)
        self.settle()
        assert self.rig.llm.reset_prefix_cache()

    def loads(self) -> tuple[int, int]:
        """Slots that were compared, and left out."""
        self.rig.settle()
        counters = group_counters(self.rig.canary.state, self.rig.canary.counter_reader)["full"]
        return counters.loads_compared, counters.loads_left_out

    @abstractmethod
    def keep(self, first: Callable[[], None], tier: str) -> None:
        """Serve the prompt for the first time, and lose whatever it is not to be loaded from."""

    def served(self, fault: Callable[[Self], None], tier: str = "") -> set[tuple[Phase, Reason]]:
        """Serve a prompt, lose its blocks, do something, and serve it again: what was found."""
        self.asked = prompt = self.prompt()
        self.rig.fresh()

        def first() -> None:
            self.first = self.rig.generate([prompt], 6)

        self.keep(first, tier)
        self.rig.settle()
        self.rig.found.clear()
        before = self.loads()
        fault(self)
        self.again = self.rig.generate([prompt], 6)
        self.rig.settle()
        compared, left_out = self.loads()
        self.compared, self.left_out = compared - before[0], left_out - before[1]
        return set(self.rig.reasons())
