"""Context parallelism: which KV cache groups keep all tokens of a request on each rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from canary_obs.engines.vllm.state_specs import keeps_states
from canary_obs.errors import UnsupportedEngine


def check_prompts_are_whole(runner: Any) -> None:
    """Raises UnsupportedEngine with prefill context parallelism: each rank is given a part of each prompt."""
    size = getattr(runner.vllm_config.parallel_config, "prefill_context_parallel_size", 1)
    if size != 1:
        raise UnsupportedEngine(
            f"vLLM's prefill_context_parallel_size={size}: a rank is given a part of each prompt, which is "
            "not supported; use 1, or run without the canary"
        )


def check_tokens_are_whole(runner: Any, specs: Sequence[Any]) -> None:
    """Raises UnsupportedEngine for a group whose tokens decode context parallelism spreads over ranks.

    A rank has every n-th token then, and its block table counts in blocks of all ranks. The V2 runner asks
    each spec (`dcp_sharded`); the V1 runner spreads all groups except states, which have no token slots.
    """
    size = getattr(runner.vllm_config.parallel_config, "decode_context_parallel_size", 1)
    asks = hasattr(runner, "block_tables")
    if size == 1 or keeps_states(specs):
        return
    if asks and not any(getattr(spec, "dcp_sharded", True) for spec in specs):
        return
    raise UnsupportedEngine(
        f"its tokens are spread over {size} ranks (decode context parallelism), so that the slots of "
        "requests cannot be followed"
    )
