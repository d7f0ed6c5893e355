"""Compressed pools under preemption: no false alarm, and unchanged outputs."""

from __future__ import annotations

from dataclasses import replace

from canary_obs.attach import install_canary
from canary_obs.config import IN_PROCESS, CanaryConfig
from canary_obs.reference_engine.engine import Engine
from canary_obs.reference_engine.scheduling.request import Sampling
from canary_obs.reference_engine.settings import tiny, with_model
from canary_obs.vocabulary import State
from tests.reference_engine.test_engine import prompt


def run(engine: Engine) -> dict[int, bytes]:
    requests = [
        engine.add_request(prompt(seed, 100 + seed), Sampling(max_tokens=60, stop_at_eos=False))
        for seed in range(5)
    ]
    while engine.has_work():
        engine.step()
    return {request.serial: request.output.tobytes() for request in requests}


def test_preemption_is_clean_and_changes_nothing() -> None:
    config = with_model(tiny(), "compressed")
    roomy, engine = Engine(config), Engine(replace(config, num_slots=5 * 128, swa_slots=5 * 128))
    canary = install_canary(engine, CanaryConfig(endpoint=IN_PROCESS, sweep_interval=20, prefix_data=True))
    assert canary is not None
    canary.mark_ready()
    answers = run(engine)
    canary.check_everything()
    assert canary.verdict() == (State.OK, ())
    final = canary.detach()
    assert engine.statistics.preemptions > 0
    assert engine.statistics.evictions > 0
    assert all(group.completed > 0 for group in final.groups.values())
    assert answers == run(roomy)
    assert roomy.statistics.preemptions == 0
