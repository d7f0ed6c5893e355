"""KV that leaves the device and comes back: the outputs do not tell."""

from __future__ import annotations

from canary_obs.reference_engine.cache.host_tier import HostTier
from canary_obs.reference_engine.engine import Engine
from canary_obs.reference_engine.settings import tiny
from tests.reference_engine.workloads import answer

TIERED: dict[str, object] = {"page_size": 4, "num_slots": 160, "host_pages": 400}


def test_outputs_are_those_of_an_engine_without_the_tier() -> None:
    plain, tiered = Engine(tiny(page_size=4, num_slots=2000)), Engine(tiny(**TIERED))
    order = [0, 1, 2, 3, 0, 1, 4, 2, 0]
    assert [answer(plain, number) for number in order] == [answer(tiered, number) for number in order]
    assert tiered.statistics.reloaded_slots > 100
    assert tiered.statistics.evicted_slots > 100


def test_the_tier_forgets_the_least_recently_used() -> None:
    engine = Engine(tiny(**TIERED | {"host_pages": 3}))
    tier = engine.scheduler.host_tier
    assert isinstance(tier, HostTier)
    for number in range(6):
        answer(engine, number)
    assert len(tier) == 3
    assert tier.offloaded > 3
