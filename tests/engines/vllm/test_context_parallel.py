"""Which groups decode context parallelism spreads over ranks; with a real engine: real/test_sharded.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from canary_kernels.buffers import WHOLE, Sharding
from canary_obs.engines.vllm.context_parallel import (
    block_tokens,
    check_can_be_sharded,
    check_prompts_are_whole,
    sharding_of,
    unless_sharded,
)
from canary_obs.errors import UnsupportedEngine

TABLES: dict[bool, dict[str, int]] = {
    False: {"dcp_world_size": 4, "dcp_rank": 3, "cp_kv_cache_interleave_size": 8},
    True: {"cp_size": 4, "cp_rank": 3, "cp_interleave": 8},
}


def runner(*, decode: int = 1, prefill: int = 1, v2: bool = False, **fields: Any) -> Any:
    parallel = SimpleNamespace(decode_context_parallel_size=decode, prefill_context_parallel_size=prefill)
    table = SimpleNamespace(**(TABLES[v2] | fields.pop("tables", {})))
    config = SimpleNamespace(parallel_config=parallel, kv_transfer_config=None, **fields)
    tables = {"block_tables": table} if v2 else {"input_batch": SimpleNamespace(block_table=[None, table])}
    return SimpleNamespace(vllm_config=config, **tables)


def spec(kind: str, **fields: Any) -> Any:
    return type(kind, (), fields)()


SHARDED = spec("FullAttentionSpec", dcp_sharded=True)
KEPT = spec("SlidingWindowSpec", dcp_sharded=False)
OLDER = spec("FullAttentionSpec")  # before specs said it
STATE = spec("MambaSpec", dcp_sharded=False)


@pytest.mark.parametrize(
    ("v2", "specs"),
    [(False, [SHARDED]), (True, [SHARDED]), (True, [OLDER]), (False, [KEPT]), (True, [KEPT, SHARDED])],
)
def test_tokens_are_spread_as_the_block_tables_say(v2: bool, specs: list[Any]) -> None:
    assert sharding_of(runner(v2=v2), 1, specs) == WHOLE
    assert sharding_of(runner(decode=4, v2=v2), 1, specs) == Sharding(ranks=4, rank=3, interleave=8)


@pytest.mark.parametrize(("v2", "specs"), [(True, [KEPT]), (True, [STATE]), (False, [STATE])])
def test_a_group_that_each_rank_keeps_whole_is_not_spread(v2: bool, specs: list[Any]) -> None:
    assert sharding_of(runner(decode=4, v2=v2), 1, specs) == WHOLE


@pytest.mark.parametrize("v2", [False, True])
def test_block_tables_that_say_something_else_are_refused(v2: bool) -> None:
    with pytest.raises(UnsupportedEngine, match="spread over 2 ranks"):
        sharding_of(runner(decode=2, v2=v2), 1, [SHARDED])
    silent = dict.fromkeys(TABLES[v2])
    with pytest.raises(UnsupportedEngine, match="does not say which are here"):
        sharding_of(runner(decode=4, v2=v2, tables=silent), 1, [SHARDED])


@pytest.mark.parametrize("v2", [False, True])
def test_connectors_are_refused_where_tokens_are_spread(v2: bool) -> None:
    served = runner(decode=4, v2=v2)
    served.vllm_config.kv_transfer_config = object()
    with pytest.raises(UnsupportedEngine, match="what a KV connector moves"):
        sharding_of(served, 1, [SHARDED])
    assert sharding_of(served, 1, [STATE]) == WHOLE


def test_only_plain_attention_is_spread() -> None:
    sharding = Sharding(ranks=2, rank=1, interleave=8)
    check_can_be_sharded(sharding, 16, plain=True)
    check_can_be_sharded(WHOLE, 16, plain=False)
    with pytest.raises(UnsupportedEngine, match="not for windows, drafts, compressed entries"):
        check_can_be_sharded(sharding, 16, plain=False)
    with pytest.raises(UnsupportedEngine, match="8 tokens in turn lie on one rank, and 12 in a block"):
        check_can_be_sharded(sharding, 12, plain=True)


def test_packed_rows_are_refused_where_they_are_spread() -> None:
    def found(_runner: Any, name: str, _page_size: int, _number: int) -> Any:
        return () if name == "packed" else None

    assert unless_sharded(WHOLE, found) is found
    refuse = unless_sharded(Sharding(ranks=2), found)
    assert refuse(None, "plain", 16, 0) is None
    with pytest.raises(UnsupportedEngine, match="packed: packed rows and index keys are not supported"):
        refuse(None, "packed", 16, 0)


def test_blocks_have_the_tokens_that_the_scheduler_counts() -> None:
    managers = [SimpleNamespace(block_size=16), SimpleNamespace(block_size=64)]
    manager = SimpleNamespace(coordinator=SimpleNamespace(single_type_managers=managers))
    assert [block_tokens(manager, number) for number in range(2)] == [16, 64]


def test_parts_of_prompts_are_refused() -> None:
    check_prompts_are_whole(runner(decode=2))
    with pytest.raises(UnsupportedEngine, match="prefill_context_parallel_size=2"):
        check_prompts_are_whole(runner(prefill=2))
