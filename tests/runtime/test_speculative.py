"""A draft model's KV is a group of its own, protected and perturbed separately from the target's."""

from __future__ import annotations

import pytest
import torch

from canary_obs.records import Violation
from canary_obs.reference_engine.execution.batch import ForwardBatch
from canary_obs.reference_engine.scheduling.scheduler import Scheduler
from canary_obs.vocabulary import PerturbMode, Reason, State
from tests.sizes import sized

# Modes of perturbation that share a run.
RUNS = sized({mode.value: [mode] for mode in PerturbMode}, {"all": list(PerturbMode)})


def instrumented(rig) -> list[Violation]:
    """Every violation that the rig's canary reports from here on."""
    rows: list[Violation] = []
    rig.canary.reporter.send_violations = rows.extend
    return rows


@pytest.mark.parametrize("page_size", sized([1, 4], [4]))
def test_traffic_with_rejected_proposals_is_clean(make_rig, page_size: int) -> None:
    rig = make_rig(engine={"draft_layers": 1, "page_size": page_size}, patrol_budget="20%", sweep_interval=50)
    rig.run(sized(350, 200))
    rig.canary.check_everything()
    statistics = rig.engine.statistics
    assert min(statistics.preemptions, statistics.evictions, statistics.aborts) > 0
    assert 0 < statistics.drafts_accepted < statistics.drafts
    assert rig.canary.verdict() == (State.OK, ())
    final = rig.canary.detach()
    for group in ("full", "draft"):
        assert sum(final.groups[group].verified.values()) > sized(50_000, 25_000)
        assert sum(final.groups[group].unverified.values()) == 0
        assert sum(sum(lane.values()) for lane in final.groups[group].violations.values()) == 0


@pytest.mark.parametrize("group", ["full", "draft"])
@pytest.mark.parametrize("modes", RUNS.values(), ids=RUNS)
def test_faults_are_found_in_their_own_group(make_rig, modes: list[PerturbMode], group: str) -> None:
    rig = make_rig(
        perturb=",".join(f"{mode}=0.2" for mode in modes), perturb_enabled=True, perturb_seed=7,
        perturb_group=group, patrol_budget="50%", sweep_interval=40, engine={"draft_layers": 1},
    )  # fmt: skip
    rows = instrumented(rig)
    rig.run(80)
    rig.canary.check_everything()
    for mode in modes:
        tally = rig.canary.injector.injections.summary()[mode]
        # With proposals to verify, few requests add a single token.
        assert tally["injected"] > (0 if (mode, group) == ("next_token_swap", "full") else 4), mode
        assert tally["detected"] + tally["masked"] == tally["injected"], mode
        assert tally["detected"] > 0.8 * tally["injected"], mode
    assert {row.group for row in rows} == {group}


def test_draft_kv_of_another_continuation_is_detected(make_rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefix cache that knows positions by their own tokens alone hands out draft KV of another text."""
    monkeypatch.setattr(Scheduler, "keys", lambda self, tokens, count: tokens[:count])
    rig = make_rig(engine={"draft_layers": 1})
    rows = instrumented(rig)
    rig.run(120)
    rig.canary.check_everything()
    assert {row.group for row in rows} == {"draft"}
    assert {row.reason for row in rows} <= {Reason.CHAIN, Reason.TOKEN}
    assert rows


def test_a_failed_draft_forward_is_adopted(make_rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig(engine={"draft_layers": 1})
    rows = instrumented(rig)
    rig.run(20)
    runner = rig.engine.drafter.runner

    def failing(*_: object) -> torch.Tensor:
        raise RuntimeError("device lost")

    with monkeypatch.context() as patch:
        patch.setattr(runner.model, "forward", failing)
        with pytest.raises(RuntimeError, match="device lost"):
            rig.run(20)
    rig.run(100)
    rig.canary.check_everything()
    assert rows == []
    assert rig.canary.health.faults.total() == 0


def test_a_forward_that_cannot_be_shown_turns_the_state_blind(make_rig, monkeypatch) -> None:
    rig = make_rig(engine={"draft_layers": 1})
    rows = instrumented(rig)
    rig.run(20)
    draft = rig.canary._adapter._draft

    def failing(batch: ForwardBatch) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(draft, "_prefix_digests", failing)
    rig.run(20)
    monkeypatch.undo()
    rig.run(60)
    rig.canary.check_everything()
    assert rows == []
    assert rig.canary.verdict()[0] is State.BLIND


def test_detach_restores_the_draft_runner(make_rig) -> None:
    rig = make_rig(engine={"draft_layers": 1})
    assert "forward" in vars(rig.engine.drafter.runner)
    rig.canary.detach()
    assert "forward" not in vars(rig.engine.drafter.runner)
