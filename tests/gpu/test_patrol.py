"""The patrol reads while forwards write: no false alarm, and corrupt bytes are found."""

from __future__ import annotations

import pytest
import torch

from canary_obs.runtime.device.byte_address import locate_byte
from canary_obs.runtime.patrol.async_checker import AsyncChecker, ScanResult
from tests.gpu.rig import make_rig


def test_no_false_alarm_while_forwards_write_at_full_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig(patrol_budget="1TB/s", engine={"num_slots": 2048, "max_running": 16, "token_budget": 512})
    suspicions = []
    results = AsyncChecker.results

    def counted(self: AsyncChecker) -> list[ScanResult]:
        found = results(self)
        suspicions.extend(result.suspicious for result in found)
        return found

    monkeypatch.setattr(AsyncChecker, "results", counted)
    for _ in range(1500):
        rig.traffic.advance(rig.engine)
        if rig.engine.has_work():
            rig.engine.step()
        for _ in range(5):  # choose a job, submit it, poll it, read its result, apply it
            rig.canary.patrol._credit = 1e12
            rig.canary.patrol.confirm(rig.canary.patrol.advance())
            rig.canary.counter_reader.poll(rig.canary.step)  # results arrive with its copies
    rig.canary.check_everything()
    assert rig.canary.counter_reader.violations == 0
    assert rig.canary.patrol.cycles > 200
    assert len(suspicions) > 1000
    assert rig.canary.detach().state_reasons == ()


def test_slots_rewritten_under_the_patrol_are_suspected_and_cleared() -> None:
    rig = make_rig(patrol_budget="1TB/s")
    rig.run(60)
    patrol, group = rig.canary.patrol, rig.canary.state.groups[0]
    # Whatever was chosen, submitted or found before is out of the way.
    patrol._chosen, results, patrol._results = None, patrol._results, []
    patrol.confirm(patrol._apply([*results, *patrol._checker.wait()]))
    while patrol._cursor:
        patrol._next_job(1)
    used = int(rig.engine.scheduler.live_slots()[0])
    address = locate_byte(group.view.sources[0], used, 3)
    address.flip(1)
    torch.cuda.synchronize()
    before = rig.canary.health.launched_runs[0][3]
    patrol._credit = 1e12
    for _ in range(2):  # choose a job with every slot of the group, submit it
        patrol.confirm(patrol.advance())
    assert patrol._checker.busy
    torch.cuda.synchronize()
    address.flip(1)
    while patrol._checker.busy or patrol._results:
        patrol._credit = 0.0
        patrol.confirm(patrol.advance())
        rig.canary.counter_reader.drain(rig.canary.step, 10.0)
    rig.canary.counter_reader.drain(rig.canary.step, 10.0)
    assert rig.canary.health.launched_runs[0][3] > before
    assert rig.canary.counter_reader.violations == 0
    rig.canary.detach()


def test_a_flipped_bit_is_found_while_the_engine_runs() -> None:
    rig = make_rig(patrol_budget="1GB/s", reuse_data=False, idle_sweep=False)
    rig.run(60)
    found = 0
    for trial in range(20):
        group = rig.canary.state.groups[0]
        used = int(rig.engine.scheduler.live_slots()[trial])
        address = locate_byte(group.view.sources[trial % 4], used, trial)
        address.flip(1 << (trial % 8))
        while rig.canary.counter_reader.violations == found:
            rig.canary.after_step()
        address.flip(1 << (trial % 8))
        torch.cuda.synchronize()
        for _ in range(30):
            rig.canary.after_step()
            torch.cuda.synchronize()
        found = rig.canary.counter_reader.violations
    assert found >= 20
    rig.canary.detach()


def test_partial_sums_are_not_shared_with_the_engines_stream() -> None:
    """int8 with scales takes several launches with partial sums between: each stream has its own scratch."""
    rig = make_rig(model="int8", patrol_budget="1TB/s", sweep_interval=20)
    assert all(group.plan.scratch is not None for group in rig.canary.state.groups)
    for _ in range(600):
        rig.run(1)
        for _ in range(3):
            rig.canary.patrol._credit = 1e12
            rig.canary.patrol.confirm(rig.canary.patrol.advance())
            rig.canary.counter_reader.poll(rig.canary.step)
    rig.canary.check_everything()
    assert rig.canary.counter_reader.violations == 0
    assert rig.canary.patrol.cycles > 100
    assert rig.canary.detach().state_reasons == ()
