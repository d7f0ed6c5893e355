"""The SGLang schedulers that replays share, one at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from tests.engines.sglang.real.rig import Rig
from tests.engines.sglang.real.tiers import STORED, TIER, TURNS
from tests.engines.sglang.real.traffic import prompts


def build(name: str, models: Callable[[str], Path], storage: Path) -> Rig:
    """The scheduler of this name."""
    from tests.engines.sglang.real import host_memory, streams

    streams.install()
    host_memory.install()
    if name == "sglang_windows":
        return Rig(models("windows"), **TIER)
    rig = Rig(models("llama"), **TIER, **STORED)
    rig.__dict__["storage"] = storage
    return rig


def generate(rig: Rig, asked: dict[str, list[int]], tokens: int = 8) -> None:
    """Serve requests, however long the threads of the storage take."""
    rig.run(rig.until_done([rig.request(name, prompt, tokens) for name, prompt in asked.items()], TURNS))


def push_out(rig: Rig) -> None:
    """Other requests take the device's slots; what was there is in host memory alone."""
    for seed in (1, 2, 3):
        now = time.monotonic_ns()
        asked = {f"{name}.{now}": prompt * 2 for name, prompt in prompts(4, seed=seed).items()}
        rig.generate(asked)
        asked = {f"{name}.{now}": prompt * 2 for name, prompt in prompts(4, seed=seed).items()}
        rig.generate(asked)


def stored(rig: Rig, files: int) -> None:
    """Wait until so many pages are in files, and forget what device and host hold."""
    from sglang.srt.managers.io_struct import FlushCacheReqInput

    folder: Path = rig.__dict__["storage"]
    deadline = time.monotonic() + 30

    def script() -> Iterator[Iterable[Any]]:
        while len(list(folder.iterdir())) < files or rig.scheduler.tree_cache.ongoing_backup:
            assert time.monotonic() < deadline
            yield ()

    rig.run(script())
    rig.run([[FlushCacheReqInput()], (), ()])


def fresh(rig: Rig) -> None:
    """Nothing cached, nothing found; damage that another report left in free slots is forgotten."""
    from sglang.srt.managers.io_struct import FlushCacheReqInput

    rig.run([[FlushCacheReqInput()], (), ()])
    rig.canary.mark_ready()
    rig.settle()
    rig.found.clear()
