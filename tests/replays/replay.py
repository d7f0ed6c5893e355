"""A public report of corrupted KV, rebuilt: where the same bug is planted, and what must be found."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from canary_obs.records import Violation


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """The bug is planted in the engine's code or its connector's, never in the canary's records."""

    report: str  # the public thread
    title: str
    mechanism: str  # as the report has it
    rebuilt: str  # what stands for it here
    rig: str  # the engine it runs on: a name in `ENGINES`
    perform: Callable[[Any, Run], None]  # is given the engine; plants the bug and serves requests
    finds: tuple[str, ...]  # "phase reason group" of the first step with violations, sorted
    steps: int = 0  # forwards that began between the moment the bug took effect and the first finding
    listed: bool = True  # among the fifteen reports; else of the same kind as one of them


ENGINES = {
    "vllm_loads": "vLLM V1, a connector that loads",
    "vllm_offload": "vLLM V1, OffloadingConnector with files",
    "vllm_states": "vLLM V1, Falcon-H1 (Mamba 2)",
    "sglang_storage": "SGLang, HiCache with a file storage",
    "sglang_windows": "SGLang, HiCache, sliding windows",
}


# All that a forward has read is compared right after it. What patrol and sweeps meet in time depends on the
# machine's load: they run once, at the end.
SETTINGS = {
    "prefix_data": "1", "state_interval": "1", "patrol_budget": "off", "idle_sweep": "0", "busy_sweep": "0",
}  # fmt: skip


@dataclass(slots=True)
class Run:
    """One run of a replay."""

    step: Callable[[], int]  # forwards that have begun
    patch: pytest.MonkeyPatch
    struck: int | None = None
    notes: dict[str, Any] = field(default_factory=dict)

    def strike(self) -> None:
        """Wrong bytes, or a wrong table, are in the engine from now on; the first time counts."""
        if self.struck is None:
            self.struck = self.step()

    def outcome(self, found: list[Violation]) -> tuple[tuple[str, ...], int]:
        """What the first step with violations showed, and how many forwards it took."""
        assert self.struck is not None, "the bug has not taken effect"
        first = min((violation.step for violation in found), default=0)
        finds = {f"{each.phase} {each.reason} {each.group}" for each in found if each.step == first}
        return tuple(sorted(finds)), first - self.struck


def collected() -> dict[str, Replay]:
    """Every replay by the name of its file, sorted."""
    from tests.replays import reports

    names = sorted(module.name for module in pkgutil.iter_modules(reports.__path__))
    return {name: importlib.import_module(f"{reports.__name__}.{name}").REPLAY for name in names}


def on(engine: str) -> list[str]:
    """Names of the replays of one engine ("vllm" or "sglang"), those of one rig together."""
    found = {name: replay for name, replay in collected().items() if replay.rig.startswith(engine)}
    return sorted(found, key=lambda name: (found[name].rig, name))
