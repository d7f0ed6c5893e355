"""Healing of a real reference engine under faults."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from canary_obs.engines.reference.heal_rehearsal import rehearse_healing
from canary_obs.reference_engine import settings
from canary_obs.reference_engine.cache.pool import PageAllocator
from canary_obs.reference_engine.engine import Engine
from canary_obs.reference_engine.scheduling.request import Sampling, Status
from canary_obs.vocabulary import HealAction, HealOutcome
from tests.engines.reference.heal.serve import Served, late, leaks, serve
from tests.engines.reference.heal_table import LANE_ROWS

REQUESTS = 24
MODELS = ["llama", "swa", "speculative", "host_tier"]


@cache
def clean(model: str) -> Served:
    return serve(REQUESTS, model=model)


def wrong(model: str, served: Served) -> set[str]:
    """Wrong answers that were delivered without an error."""
    right = clean(model).answers
    return {name for name, own in served.answers.items() if own != right[name]} - served.errors


@pytest.mark.parametrize(
    ("model", "policy"),
    [
        *((model, "protect") for model in MODELS),
        ("llama", "repair"),
        ("host_tier", "repair"),
        pytest.param("compressed", "protect", marks=pytest.mark.slow),  # a third of all others together
    ],
)
def test_nothing_wrong_leaves_after_detection_and_nothing_leaks(model: str, policy: str) -> None:
    served = serve(REQUESTS, model=model, policy=policy, faults=7, lane_rows=LANE_ROWS.get(model, 32))
    delivered = wrong(model, served)
    assert delivered <= set(served.listed)
    assert late(clean(model), served) == set()
    assert served.causes == {}
    assert served.ghosts == set()
    assert (served.leaked, served.faults, served.status and served.status.why) == ([], {}, None)
    done = served.actions(HealOutcome.DONE)
    assert done[HealAction.END] == len(served.errors)
    assert done[HealAction.END] + done[HealAction.RECOMPUTE] > 0
    assert (done[HealAction.REPAIR] > 0) is (policy == "repair")
    assert clean(model).leaked == []
    assert set(served.answers) == set(clean(model).answers)


def test_the_rehearsal_agrees_and_notices_what_does_not() -> None:
    engine = Engine(settings.tiny())
    assert rehearse_healing(engine) is None

    class Forgetful(Engine):
        def fail(self, request_id: str) -> None:
            self.abort(request_id)

    changed = Engine(settings.tiny())
    changed.__class__ = Forgetful
    assert "was not returned as failed" in str(rehearse_healing(changed))


def test_a_withdrawn_page_is_not_handed_out_until_it_is_restored() -> None:
    pool = PageAllocator(16, 4)
    mine = pool.allocate(1)
    pool.withdraw(int(mine[0]) // 4)
    pool.withdraw(3)
    assert pool.free_pages == 2
    pool.free(mine)
    assert pool.free_pages == 2
    assert not set((pool.allocate(2) // 4).tolist()) & {int(mine[0]) // 4, 3}
    pool.restore(3)
    pool.restore(3)
    assert pool.free_pages == 1
    assert set((pool.allocate(1) // 4).tolist()) == {3}


def test_what_requests_use_is_freed_once_after_it_was_discarded() -> None:
    engine = Engine(settings.tiny(page_size=4))
    prompt = list(range(4, 40))
    ask = Sampling(max_tokens=6, stop_at_eos=False)
    first = engine.add_request(_ids(prompt), ask)
    while engine.has_work():
        engine.step()
    readers = [engine.add_request(_ids([*prompt, 50 + number]), ask) for number in range(3)]
    engine.step()
    cache = engine.scheduler.cache
    cache.discard(cache.roots[0], 8)
    assert cache.detached.any()
    assert set(cache.held().tolist()) == set(first.slots[:8].tolist())
    engine.abort(readers[0].id)
    assert cache.detached.any()
    while engine.has_work():
        engine.step()
    assert [one.status for one in readers[1:]] == [Status.FINISHED] * 2
    assert set(cache.held().tolist()) == set(first.slots[:8].tolist())
    assert leaks(engine) == []


def _ids(tokens: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(tokens, dtype=np.int32)
