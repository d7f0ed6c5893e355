"""Which groups can be followed with context parallelism; with a real hybrid: real/test_states.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from canary_obs.engines.vllm.context_parallel import check_prompts_are_whole, check_tokens_are_whole
from canary_obs.errors import UnsupportedEngine


def runner(*, decode: int = 1, prefill: int = 1, v2: bool = False) -> Any:
    parallel = SimpleNamespace(decode_context_parallel_size=decode, prefill_context_parallel_size=prefill)
    tables = {"block_tables": object()} if v2 else {}
    return SimpleNamespace(vllm_config=SimpleNamespace(parallel_config=parallel), **tables)


def spec(kind: str, **fields: Any) -> Any:
    return type(kind, (), fields)()


SHARDED = spec("FullAttentionSpec", dcp_sharded=True)
WHOLE = spec("SlidingWindowSpec", dcp_sharded=False)
OLDER = spec("FullAttentionSpec")  # before specs said it
STATE = spec("MambaSpec", dcp_sharded=False)


@pytest.mark.parametrize(
    ("v2", "specs"),
    [(False, [SHARDED]), (True, [SHARDED]), (True, [OLDER]), (False, [WHOLE]), (True, [WHOLE, SHARDED])],
)
def test_a_group_whose_tokens_are_spread_over_ranks_is_not_followed(v2: bool, specs: list[Any]) -> None:
    check_tokens_are_whole(runner(v2=v2), specs)
    with pytest.raises(UnsupportedEngine, match="spread over 4 ranks"):
        check_tokens_are_whole(runner(decode=4, v2=v2), specs)


@pytest.mark.parametrize(("v2", "specs"), [(True, [WHOLE]), (True, [STATE]), (False, [STATE])])
def test_a_group_that_each_rank_keeps_whole_is_followed(v2: bool, specs: list[Any]) -> None:
    check_tokens_are_whole(runner(decode=4, v2=v2), specs)


def test_parts_of_prompts_are_refused() -> None:
    check_prompts_are_whole(runner(decode=2))
    with pytest.raises(UnsupportedEngine, match="prefill_context_parallel_size=2"):
        check_prompts_are_whole(runner(prefill=2))
