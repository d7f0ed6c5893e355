"""What a worker tells of its place in a deployment."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from canary_obs.engines.vllm.worker import own_part


def worker(**parallel: Any) -> Any:
    given = {
        "distributed_executor_backend": "mp", "data_parallel_external_lb": False, "data_parallel_index": 0,
        "world_size": 2,
    }  # fmt: skip
    return SimpleNamespace(
        rank=1, vllm_config=SimpleNamespace(parallel_config=SimpleNamespace(**given | parallel))
    )


@pytest.mark.parametrize(
    ("parallel", "part"),
    [
        ({}, ""),
        ({"data_parallel_index": 3}, ""),
        ({"data_parallel_external_lb": True, "data_parallel_index": 3}, "-replica3"),
        ({"distributed_executor_backend": "external_launcher"}, "-rank1"),
        ({"distributed_executor_backend": "external_launcher", "data_parallel_index": 3}, "-rank7"),
    ],
)
def test_servers_that_are_started_one_by_one_are_parts(parallel: dict[str, Any], part: str) -> None:
    assert own_part(worker(**parallel)) == part
