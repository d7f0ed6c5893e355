"""The faults of the healing table leave nothing behind that they did not plant."""

from __future__ import annotations

import numpy as np

from canary_obs.attach import install_canary
from canary_obs.config import IN_PROCESS, CanaryConfig
from canary_obs.reference_engine import settings
from canary_obs.reference_engine.engine import Engine
from canary_obs.reference_engine.scheduling.request import Sampling
from tests.engines.reference.heal.faults import Faults


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
