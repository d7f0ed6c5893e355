"""A batch that `canary-obs bench step` repeats is shown to the canary as it was scheduled."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest

from canary_kernels import layout
from canary_obs.attach import install_canary
from canary_obs.bench.repeated_step import as_scheduled
from canary_obs.config import IN_PROCESS, CanaryConfig
from canary_obs.reference_engine.engine import Engine
from canary_obs.reference_engine.scheduling.request import Sampling
from canary_obs.reference_engine.settings import tiny

REQUESTS, PROMPT = 3, 40


@pytest.mark.parametrize("restored", [True, False], ids=["as it was scheduled", "as things are now"])
def test_a_prefill_repeated_when_its_requests_decode(restored: bool) -> None:
    engine = Engine(tiny())
    canary = install_canary(engine, CanaryConfig(endpoint=IN_PROCESS, idle_sweep=False))
    assert canary is not None
    canary.mark_ready()
    for number in range(REQUESTS):
        prompt = (np.arange(PROMPT) * 7 + number).astype(np.int32) % 250
        engine.add_request(prompt, Sampling(max_tokens=8, stop_at_eos=False))
    prefill = engine.runner.prepare(engine.scheduler.schedule())
    while any(request.remaining > 1 for request in engine.scheduler.running):
        engine.step()
    computed = [request.computed for request in prefill.requests]
    assert computed != list(prefill.prefixes)
    tail = layout.COUNT_VERIFIED + layout.Phase.TAIL
    before = int(canary.state.counters[tail])
    with as_scheduled(prefill) if restored else nullcontext():
        engine.runner.forward(prefill)
    after = int(canary.state.counters[tail])
    canary.check_everything()
    if restored:
        assert after - before == sum(prefill.extends) > 1
        assert (canary.counter_reader.violations, dict(canary.health.faults)) == (0, {})
    else:  # tokens of other positions, or too few of them
        assert canary.counter_reader.violations or canary.health.faults
    assert [request.computed for request in prefill.requests] == computed
    canary.detach()
