"""Engines with a host tier, and with a storage behind it: settings, and what tests do with one."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from canary_obs.engines.sglang.host_tier import HostTier
from tests.engines.sglang.real import streams
from tests.engines.sglang.real.rig import Rig
from tests.engines.sglang.real.traffic import prompts

COPIED_BY_INDEX: dict[str, Any] = {"hicache_io_backend": "direct", "hicache_mem_layout": "layer_first"}
TIER: dict[str, Any] = {
    "enable_hierarchical_cache": True, "hicache_ratio": 4.0, "max_total_tokens": 832, **COPIED_BY_INDEX,
}  # fmt: skip
STORED: dict[str, Any] = {
    "hicache_storage_backend": "file", "hicache_storage_prefetch_policy": "wait_complete", "page_size": 16,
}  # fmt: skip
TURNS = 10**7  # of the loop, at most: threads are waited for
PROMPT = {"kept": list(range(20, 276))}


def install() -> None:
    """What a host tier asks of a machine with CUDA, for the rest of this process."""
    from tests.engines.sglang.real import host_memory

    streams.install()
    host_memory.install()


def tier(rig: Rig) -> HostTier:
    assert rig.adapter.host_tier is not None
    return rig.adapter.host_tier


def push_out(rig: Rig) -> None:
    """Other requests take the device's slots; what was there is in host memory alone."""
    for seed in (1, 2, 3):
        rig.generate({name: prompt * 2 for name, prompt in prompts(4, seed=seed).items()})


def flip_in_host(rig: Rig, group: str) -> int:
    """One bit in each host slot that a group uses. How many."""
    entries = {
        tier(rig)._groups[id(entry.device_pool)]: entry
        for entry in rig.scheduler.tree_cache.cache_controller.mem_pool_host.entry_map.values()
    }
    entry = entries.get(group, entries["full"])  # drafts may be the last layer there (MTP)
    given = entries["full" if group == "draft" else group]  # drafts take the host slots of the target's KV
    slots = torch.nonzero(given.host_pool.slot_used).flatten().tolist()
    assert slots
    buffer = entry.host_pool.kv_buffer
    layers = buffer[0] if buffer.dim() == 5 else buffer  # K and V, or latent vectors
    with torch.inference_mode():
        for slot in slots:
            layers[0 if group in entries else -1][slot].view(torch.uint8).view(-1)[3] ^= 4
    return len(slots)


def store(rig: Rig, folder: Path, kept: Sequence[int] = PROMPT["kept"]) -> None:
    """The kept prompt's pages are in files, and nowhere else."""
    generate(rig, {"kept": list(kept)})
    deadline = time.monotonic() + 30

    def script() -> Iterator[Iterable[Any]]:
        while len(list(folder.iterdir())) < len(kept) // 16 or rig.scheduler.tree_cache.ongoing_backup:
            assert time.monotonic() < deadline
            yield ()

    rig.run(script())
    forget(rig)


def forget(rig: Rig) -> None:
    """Flush the device's cache and the host's."""
    from sglang.srt.managers.io_struct import FlushCacheReqInput

    rig.run([[FlushCacheReqInput()], (), ()])


def generate(rig: Rig, asked: dict[str, list[int]]) -> None:
    """Wait as long as the threads of the storage take."""
    rig.run(rig.until_done([rig.request(name, prompt, 8) for name, prompt in asked.items()], TURNS))


def flip_in_file(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[100] ^= 16
    path.write_bytes(content)
