"""Every model and KV cache: no false alarm, and no injection missed."""

from __future__ import annotations

from functools import cache

import pytest

from canary_obs.engines.reference.adapter import ReferenceAdapter
from canary_obs.reference_engine.engine import Engine
from canary_obs.reference_engine.settings import MODELS, tiny, with_model
from canary_obs.vocabulary import PerturbMode, State
from tests.runtime.conftest import MakeRig
from tests.sizes import sized

STEPS = {"compressed": 120}  # seven groups, slower steps
USUAL_STEPS = sized(220, 140)  # tests/test_soak.py runs clean traffic for longer


@cache
def groups_of(model: str) -> tuple[str, ...]:
    return tuple(group.name for group in ReferenceAdapter(Engine(with_model(tiny(), model))).groups)


CASES = [(model, group) for model in MODELS for group in groups_of(model)]
# Those of windows and of drafts have files of their own: report/test_swa_divergence.py, test_speculative.py.
FEWER = [(model, groups_of(model)[-1]) for model in ("llama", "mla_sparse", "compressed")]


@pytest.mark.parametrize("model", sized(MODELS, ("llama", "swa", "compressed")))
def test_traffic_is_clean(make_rig: MakeRig, model: str) -> None:
    rig = make_rig(model=model, sweep_interval=50)
    rig.run(STEPS.get(model, USUAL_STEPS))
    rig.finish_requests()
    rig.canary.check_everything()
    assert rig.canary.verdict() == (State.OK, ())
    assert rig.canary.state.coverage == 1.0
    statistics = rig.engine.statistics
    assert min(statistics.evictions, statistics.prefix_hit_tokens, statistics.aborts) > 0
    final = rig.canary.detach()
    for name in groups_of(model):
        group = final.groups[name]
        assert sum(group.verified.values()) > 0
        assert group.completed > 0
        assert sum(sum(reasons.values()) for reasons in group.violations.values()) == 0


@pytest.mark.parametrize(("model", "group"), sized(CASES, FEWER))
def test_no_injection_is_missed(make_rig: MakeRig, model: str, group: str) -> None:
    rig = make_rig(
        model=model, perturb=",".join(f"{mode.value}=0.15" for mode in PerturbMode), perturb_enabled=True,
        perturb_group=group, perturb_seed=7, patrol_budget="50%", sweep_interval=40,
    )  # fmt: skip
    rig.run(STEPS.get(model, USUAL_STEPS))
    rig.canary.check_everything()
    assert rig.canary.injector is not None
    for mode, tally in rig.canary.injector.injections.counts().items():
        assert (mode, tally.missed, tally.open) == (mode, 0, 0)
        if group.endswith("_state") and mode is PerturbMode.REAL_KV_UNUSED_CACHE:
            # The prefix cache holds whole pages, and pages are whole runs: no incomplete run, whose states
            # these are, is ever cached, so there is no unused byte of theirs to flip.
            shape, page_size = rig.engine.config.shape, rig.engine.config.page_size
            assert not any(page_size % ratio for ratio in shape.compressed.ratios)
            assert tally.injected == 0
        elif group.startswith("c") and mode is PerturbMode.NEXT_TOKEN_SWAP:
            why = {"the group's entries are not the tokens of the forward"}
            assert set(rig.canary.injector.injections.summary()[mode.value]["skipped"]) == why
        else:
            assert tally.detected > 0, mode
