"""What keeps healing from being more than a dry run, before a scheduler is tried."""

from __future__ import annotations

from types import SimpleNamespace

from canary_obs.engines.vllm.heal_rehearsal import rehearse_healing


def test_findings_of_all_ranks_must_reach_the_scheduler() -> None:
    scheduler = SimpleNamespace(parallel_config=SimpleNamespace(world_size=2))
    assert "one of 2 ranks" in str(rehearse_healing(scheduler))
