"""What keeps healing from being more than a dry run, before a scheduler is tried."""

from __future__ import annotations

from types import SimpleNamespace

from canary_obs.engines.vllm.heal_rehearsal import rehearse_healing


def test_findings_of_all_ranks_must_reach_the_scheduler() -> None:
    ranks = {"world_size": 2, "tensor_parallel_size": 2, "distributed_executor_backend": "ray"}
    scheduler = SimpleNamespace(parallel_config=SimpleNamespace(**ranks))
    assert "one of 2 ranks with distributed_executor_backend=ray" in str(rehearse_healing(scheduler))
    scheduler = SimpleNamespace(parallel_config=SimpleNamespace(**ranks | {"tensor_parallel_size": 1}))
    assert "results of the last stage of 2 ranks" in str(rehearse_healing(scheduler))


def test_tokens_that_are_spread_over_ranks_allow_a_dry_run() -> None:
    ranks = {"world_size": 2, "tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    config = SimpleNamespace(**ranks, decode_context_parallel_size=2)
    why = str(rehearse_healing(SimpleNamespace(parallel_config=config)))
    assert "decode_context_parallel_size=2" in why
