"""Engine settings with a host tier, and with a storage behind it."""

from __future__ import annotations

from typing import Any

TIER: dict[str, Any] = {
    "enable_hierarchical_cache": True, "hicache_ratio": 4.0, "max_total_tokens": 832,
    "hicache_io_backend": "direct", "hicache_mem_layout": "layer_first",
}  # fmt: skip
STORED: dict[str, Any] = {
    "hicache_storage_backend": "file", "hicache_storage_prefetch_policy": "wait_complete", "page_size": 16,
}  # fmt: skip
TURNS = 10**7  # of the loop, at most: threads are waited for
