"""The faults of the healing table leave nothing behind that they did not plant."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from canary_obs.attach import install_canary
from canary_obs.config import IN_PROCESS, CanaryConfig
from canary_obs.reference_engine import settings
from canary_obs.reference_engine.engine import Engine
from canary_obs.reference_engine.scheduling.request import Sampling
from tests.engines.reference.heal.faults import Faults
from tests.engines.reference.heal.judge import WRONG, Judge
from tests.engines.reference.heal.serve import Listing, Served, late, serve


def test_an_entry_is_not_put_back_for_a_request_that_has_started_again_in_the_other_page() -> None:
    engine = Engine(settings.tiny(seed=3, page_size=4))
    canary = install_canary(engine, CanaryConfig(endpoint=IN_PROCESS))
    assert canary is not None
    harm = Faults(engine, canary._adapter, 5)
    harm.kinds = {"wrong table entry": harm.kinds["wrong table entry"]}
    request = engine.add_request(np.arange(4, 9, dtype=np.int32), Sampling(max_tokens=8, stop_at_eos=False))
    request.cacheable = 0  # its pages do not wait for it in the prefix cache
    engine.step()
    table, pool = engine.runner.pool.req_to_token, engine.scheduler.allocator
    right = int(table[request.row, 0])
    harm.plant(0)
    wrong = int(table[request.row, 0])
    assert (harm.planted.total(), wrong != right) == (1, True)
    engine.scheduler.preempt(request)
    pool.withdraw(wrong // 4)
    pool.restore(wrong // 4)  # what was freed last is handed out first
    engine.step()
    assert int(request.slots[0]) == wrong
    harm.settle(None)
    assert int(table[request.row, 0]) == wrong
    canary.detach()


@pytest.mark.parametrize(
    ("alive", "kept", "later", "counts"),
    [
        (False, 0, [], False),  # listed after its end
        (True, 0, [], True),
        (True, 0, [(110, 0)], False),  # cured, and misled by what was planted later
        (True, 0, [(107, 0)], True),  # planted before it was listed: it ought to be cured of both
        (True, 0, [(113, 0)], True),  # planted after the wrong token
        (True, 0, [(110, 4)], True),  # read for later tokens
        (True, 4, [(110, 0)], True),  # the wrong token stayed when it started again
        (False, 4, [], True),
        (False, 4, [(107, 0)], False),  # nobody knew then that it was wrong
    ],
)
def test_a_wrong_token_after_the_detection_is_not_one_of_a_later_fault(
    alive: bool, kept: int, later: list[tuple[int, int]], counts: bool
) -> None:
    clean = Served(model="llama", answers={"r": [7, 7, 7, 7, 7]})
    served = Served(model="llama", answers={"r": [7, 7, 7, 9, 9]}, sent={"r": [109, 110, 111, 112, 113]})
    served.listed["r"] = Listing(first_output=0, derived=False, alive=alive, step=108, later=later)
    served.kept["r"] = kept
    assert late(clean, served) == ({"r"} if counts else set())
    served.errors.add("r")
    assert late(clean, served) == set()


def test_a_token_as_likely_as_the_best_one_is_not_wrong() -> None:
    clean = serve(1)
    judge, (right,) = Judge(clean), clean.answers.values()
    assert judge.behind("r0", right, 0) < WRONG
    other = [*right[:-1], 5 if right[-1] != 5 else 6]
    assert judge.behind("r0", other, len(right) - 1) > WRONG
    tied = replace(clean, answers={"r0": other})
    assert judge.nearly_right(tied) == {}
    judge.behind = lambda *_: WRONG / 2  # type: ignore[method-assign]
    assert judge.nearly_right(tied) == {"r0": WRONG / 2}
