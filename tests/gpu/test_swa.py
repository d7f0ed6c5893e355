"""Sliding-window groups on a GPU: in captured graphs and without, reported without a wait."""

from __future__ import annotations

import pytest

from canary_obs.vocabulary import PerturbMode, State
from tests.gpu.rig import make_rig, refuse_waits
from tests.reference_engine.workloads import account


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("page_size", [1, 16])
def test_clean_traffic_has_no_violation(page_size: int, graphs: bool) -> None:
    rig = make_rig(
        model="swa", sweep_interval=25, patrol_budget="1GB/s",
        engine={"page_size": page_size, "cuda_graphs": graphs},
    )  # fmt: skip
    rig.run(600)
    account(rig.engine)
    rig.canary.check_everything()
    final = rig.canary.detach()
    assert (final.state, final.state_reasons) == (State.OK, ())
    found = final.swa_divergence
    assert found is not None
    assert min(found.out_of_window, found.index_divergence) >= 1
    assert 0 < found.verified_swa < found.verified_full


@pytest.mark.parametrize("group", ["full", "swa"])
@pytest.mark.parametrize("mode", [mode.value for mode in PerturbMode])
def test_every_injection_is_accounted_for(mode: str, group: str) -> None:
    rig = make_rig(
        model="swa", perturb=f"{mode}=0.2", perturb_enabled=True, perturb_seed=7, perturb_group=group,
        patrol_budget="1GB/s", sweep_interval=40,
    )  # fmt: skip
    rig.run(300)
    rig.canary.check_everything()
    assert rig.canary.injector is not None
    tally = rig.canary.injector.injections.counts()[PerturbMode(mode)]
    assert tally.injected > 15
    assert tally.detected > 0.8 * tally.injected
    assert tally.detected + tally.masked == tally.injected


def test_no_hook_synchronises(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig(model="swa", swa_divergence_interval=1, sweep_interval=10, patrol_budget="1GB/s")
    rig.run(20)
    calls = refuse_waits(rig.canary, monkeypatch)
    rig.run(60)
    assert min(calls.values()) >= 60
    assert not rig.canary.health.faults
    assert rig.canary.swa.latest is not None
    assert rig.canary.swa.latest.step >= rig.canary.step - 1
