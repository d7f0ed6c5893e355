"""Context parallelism: which ranks hold which tokens of a request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from canary_kernels.buffers import WHOLE, KVSource, Sharding
from canary_obs.engines.vllm.state_specs import keeps_states
from canary_obs.errors import UnsupportedEngine

FindPacked = Callable[[Any, str, int, int], tuple[KVSource, ...] | None]  # see packed_windows.py


def check_prompts_are_whole(runner: Any) -> None:
    """Raises UnsupportedEngine with prefill context parallelism: each rank is given a part of each prompt."""
    size = getattr(runner.vllm_config.parallel_config, "prefill_context_parallel_size", 1)
    if size != 1:
        raise UnsupportedEngine(
            f"vLLM's prefill_context_parallel_size={size}: a rank is given a part of each prompt, which is "
            "not supported; use 1, or run without the canary"
        )


def sharding_of(runner: Any, number: int, specs: Sequence[Any]) -> Sharding:
    """How decode context parallelism spreads the tokens of a group over ranks; WHOLE = it does not.

    The V2 runner asks each spec (`dcp_sharded`); the V1 runner spreads all groups except states, which have
    no token slots. Raises UnsupportedEngine where the slots of a group that is spread cannot be followed.
    """
    size = getattr(runner.vllm_config.parallel_config, "decode_context_parallel_size", 1)
    asks = hasattr(runner, "block_tables")
    if size == 1 or keeps_states(specs):
        return WHOLE
    if asks and not any(getattr(spec, "dcp_sharded", True) for spec in specs):
        return WHOLE
    tables = runner.block_tables if asks else runner.input_batch.block_table[number]
    names = _V2_NAMES if asks else _V1_NAMES
    ranks, rank, interleave = (getattr(tables, name, None) for name in names)
    if ranks != size or rank is None or interleave is None:
        raise UnsupportedEngine(
            f"its tokens are spread over {size} ranks (decode context parallelism), and its block table "
            f"does not say which are here: {dict(zip(names, (ranks, rank, interleave), strict=True))}"
        )
    if getattr(runner.vllm_config, "kv_transfer_config", None) is not None:
        raise UnsupportedEngine(
            f"its tokens are spread over {size} ranks (decode context parallelism), and what a KV connector "
            "moves of them cannot be followed"
        )
    return Sharding(ranks=int(ranks), rank=int(rank), interleave=int(interleave))


def check_can_be_sharded(sharding: Sharding, page_size: int, *, plain: bool) -> None:
    """Raises UnsupportedEngine for a group that is spread over ranks in a way that was not tried.

    page_size: tokens of this rank per entry of the block table. `plain`: full attention of the target model,
    with a slot for each token.
    """
    if sharding.ranks > 1 and not plain:
        raise UnsupportedEngine(
            f"its tokens are spread over {sharding.ranks} ranks (decode context parallelism), which is "
            "supported for full attention of the target model, not for windows, drafts, compressed entries"
        )
    if page_size % sharding.interleave:
        raise UnsupportedEngine(
            f"{sharding.interleave} tokens in turn lie on one rank, and {page_size} in a block of "
            "attention's; use a cp_kv_cache_interleave_size that divides it"
        )


def unless_sharded(sharding: Sharding, find: FindPacked) -> FindPacked:
    """`find` of packed rows and index keys, which are refused where tokens are spread over ranks."""
    if sharding.ranks == 1:
        return find

    def refuse(runner: Any, name: str, page_size: int, number: int) -> None:
        if find(runner, name, page_size, number) is not None:
            raise UnsupportedEngine(
                f"{name}: packed rows and index keys are not supported with decode context parallelism"
            )

    return refuse


# In a runner's block tables: ranks that share a request's tokens, this rank, tokens in turn on one rank.
_V1_NAMES = "dcp_world_size", "dcp_rank", "cp_kv_cache_interleave_size"
_V2_NAMES = "cp_size", "cp_rank", "cp_interleave"


def block_tokens(manager: Any, number: int) -> int:
    """Tokens per block of a KVCacheManager's group, those of all ranks that share a request's tokens."""
    return int(manager.coordinator.single_type_managers[number].block_size)
