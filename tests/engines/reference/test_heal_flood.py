"""A check that is wrong itself reports everything as damaged: healing stops before it does harm."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from canary_obs.attach import install_canary
from canary_obs.config import IN_PROCESS, CanaryConfig
from canary_obs.records import Violation
from canary_obs.reference_engine import settings
from canary_obs.reference_engine.engine import Engine
from canary_obs.reference_engine.scheduling.request import Sampling, Status
from canary_obs.vocabulary import HealAction, HealOutcome, HealPolicy, Part, Phase, Reason, State
from tests.sizes import sized

ACTIONS, SHARE = 6, 0.25
_DONE = (HealOutcome.DONE, HealOutcome.UNVERIFIED)


@pytest.mark.parametrize(
    "model", ["llama", "host_tier", "swa", *sized(["speculative", "mla_sparse", "compressed"], [])]
)
def test_a_flood_of_false_findings_empties_no_cache_and_ends_few_requests(model: str) -> None:
    engine = Engine(settings.with_model(settings.tiny(seed=3, page_size=4), model))
    config = CanaryConfig(
        endpoint=IN_PROCESS, patrol_budget="1B/s", heal=HealPolicy.PROTECT, heal_actions_per_minute=ACTIONS,
        heal_pool_share=SHARE,
    )  # fmt: skip
    canary = install_canary(engine, config)
    assert canary is not None
    canary.mark_ready()
    for first in range(4):  # what is cached when the check goes wrong
        engine.add_request(_prompt(engine, first), Sampling(max_tokens=4, stop_at_eos=False))
    _serve(engine)
    before, heals = engine.scheduler.cache.size, []
    report = canary.healing._send
    canary.healing._send = lambda rows: (heals.extend(rows), report(rows))[1]
    requests = [
        engine.add_request(_prompt(engine, 4 + number % 4), Sampling(max_tokens=12, stop_at_eos=False))
        for number in range(12)
    ]
    for _ in range(6):
        engine.step()
        canary.delivery.deliver([_false(group.name, slot, canary.step) for group in canary._adapter.groups
                                 for slot in canary._adapter.slots_in_use(group.name).tolist()])  # fmt: skip
    _serve(engine)
    done = [heal for heal in heals if heal.outcome in _DONE]
    failed = [request for request in requests if request.status is Status.FAILED]
    assert 0 < len(done) <= ACTIONS
    assert len(failed) == Counter(heal.action for heal in done)[HealAction.END] < ACTIONS
    assert sum(heal.blocks for heal in done) <= SHARE * canary.healing.status.pool_blocks
    assert engine.scheduler.cache.size > before / 2
    outcomes = Counter(heal.outcome for heal in heals)
    assert outcomes[HealOutcome.LIMITED] > 0, (outcomes, canary.healing.status)
    assert outcomes[HealOutcome.WOULD] > 0
    status, (state, reasons) = canary.healing.status, canary.verdict()
    assert state is not State.OK
    assert (status.policy, status.effective) == (HealPolicy.PROTECT, HealPolicy.DRY_RUN)
    assert "heal_actions_per_minute" in str(status.why) or "heal_pool_share" in str(status.why)
    assert any("healing is a dry run, not protect" in reason for reason in reasons)
    assert not canary.health.faults
    canary.detach()


def _prompt(engine: Engine, number: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """More than a page."""
    length = max(24, engine.config.page_size * 5 // 4)
    return np.arange(length, dtype=np.int32) * (number + 1) % 200 + 4


def _serve(engine: Engine) -> None:
    while engine.has_work():
        engine.step()


def _false(group: str, slot: int, step: int) -> Violation:
    return Violation(
        phase=Phase.PATROL, reason=Reason.KV_DATA, group=group, part=Part.K, step=step, event=1, slot=slot,
        position=None, request=None, expected=None, actual=None, lag_steps=0, time_ns=0,
    )  # fmt: skip
