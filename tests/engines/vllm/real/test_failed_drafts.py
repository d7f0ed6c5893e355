"""A load that fails with its forward, in an engine that drafts: its step's checks precede sampling."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.engines.vllm.real import test_failed_loads
from tests.engines.vllm.real.rig import Rig

failures = test_failed_loads.failures


def test_with_drafts_a_block_that_fails_with_the_forward_is_no_lost_load(
    make_rig: Callable[..., Rig], models: Callable[[str], Path], failures: Any
) -> None:
    drafts = {"method": "eagle", "model": str(models("llama_eagle")), "num_speculative_tokens": 2}
    rig = make_rig(
        num_gpu_blocks_override=60, kv_transfer_config=test_failed_loads.CONNECTOR,
        speculative_config=drafts, max_model_len=512, async_scheduling=False,
    )  # fmt: skip
    test_failed_loads.test_a_block_that_fails_with_the_forward_is_no_lost_load(rig, failures)
