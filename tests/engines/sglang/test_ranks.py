"""Numbers of schedulers, as one service is to expect them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from canary_obs.engines.sglang.ranks import first_head, ranks_of


def scheduler(heads: int = 8, nnodes: int = 1, node_rank: int = 0, **given: Any) -> Any:
    sizes = {"tp_size": 1, "pp_size": 1, "dp_size": 1, "enable_dp_attention": False}
    sizes |= {name: value for name, value in given.items() if name in sizes}
    ranks = {"tp_rank": 0, "pp_rank": 0, "dp_rank": None, "attn_tp_rank": 0, "attn_tp_size": 1}
    ranks |= {name: value for name, value in given.items() if name in ranks}
    return SimpleNamespace(
        server_args=SimpleNamespace(**sizes, nnodes=nnodes, node_rank=node_rank),
        ps=SimpleNamespace(**ranks),
        model_config=SimpleNamespace(
            get_total_num_kv_heads=lambda: heads, get_num_kv_heads=lambda size: max(1, heads // size)
        ),
    )


@pytest.mark.parametrize(
    ("given", "rank", "expected"),
    [
        ({}, 0, "0-0"),
        ({"tp_size": 4, "tp_rank": 3}, 3, "0-3"),
        ({"tp_size": 2, "pp_size": 2, "tp_rank": 1, "pp_rank": 1}, 3, "0-3"),
        ({"tp_size": 2, "dp_size": 3, "dp_rank": 2, "tp_rank": 1}, 5, "0-5"),
        # The replicas of attention are tensor-parallel ranks of one model.
        ({"tp_size": 4, "dp_size": 2, "dp_rank": 1, "tp_rank": 2, "enable_dp_attention": True}, 2, "0-3"),
    ],
)
def test_every_scheduler_has_a_number_of_its_own(given: dict[str, Any], rank: int, expected: str) -> None:
    for local in (True, False):
        assert ranks_of(scheduler(**given), local=local) == (rank, expected)


@pytest.mark.parametrize(
    ("sizes", "node", "expected"),
    [
        ({"tp_size": 4}, 0, "0-1"),
        ({"tp_size": 4}, 1, "2-3"),
        ({"tp_size": 4, "pp_size": 2}, 1, "4-7"),
        ({"tp_size": 2, "pp_size": 4}, 1, "4-7"),
    ],
)
def test_a_service_of_one_host_expects_its_ranks(sizes: dict[str, int], node: int, expected: str) -> None:
    found = scheduler(**sizes, nnodes=2, node_rank=node)
    assert ranks_of(found, local=True)[1] == expected
    total = sizes["tp_size"] * sizes.get("pp_size", 1)
    assert ranks_of(found, local=False)[1] == f"0-{total - 1}"


@pytest.mark.parametrize(
    ("heads", "size", "rank", "first"), [(8, 1, 0, 0), (8, 4, 3, 6), (2, 2, 1, 1), (2, 4, 1, 0), (2, 4, 2, 1)]
)
def test_heads_have_the_numbers_that_the_model_has(heads: int, size: int, rank: int, first: int) -> None:
    assert first_head(scheduler(heads, attn_tp_size=size, attn_tp_rank=rank)) == first
