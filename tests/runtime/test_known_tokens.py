"""Tokens compared with what a scheduler knows: every request that it scheduled is accounted for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from canary_kernels import layout
from canary_obs.engine_api.views import GroupTokens, StepView
from canary_obs.engines.reference.adapter import ReferenceAdapter
from canary_obs.runtime import forward
from canary_obs.vocabulary import Phase, Reason, State
from tests.oracles import records as oracle

NOT_CHECKED = "tokens were not checked: comparison of tokens with the scheduler's, group full"
LEFT_OUT = "were not compared with the scheduler's"


class Scheduler:
    """The tokens of the reference engine's requests, as if they came from another process."""

    def __init__(self) -> None:
        self.scheduled = 0
        self.known: Callable[[list[int], int], int] = lambda tokens, stop: min(len(tokens), stop)
        self.garble: Callable[[list[int]], list[int]] = lambda tokens: tokens

    def complete(self, view: StepView, batch: Any) -> StepView:
        self.scheduled += len(batch.requests)
        lens, digests = [], []
        for request, extend in zip(batch.requests, batch.extends, strict=True):
            tokens = request.tokens[: request.length].tolist()
            lens.append(self.known(tokens, request.computed + extend))
            digests.append(oracle.signed(oracle.digest_of(self.garble(tokens[: max(0, lens[-1])]))))
        columns = torch.tensor([lens, digests], dtype=torch.int64).to(view.rows.device)
        return replace(view, known_lens=columns[0], known_digests=columns[1])


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Scheduler:
    made, complete = Scheduler(), ReferenceAdapter._complete
    monkeypatch.setattr(
        ReferenceAdapter,
        "_complete",
        lambda self, view, batch: made.complete(complete(self, view, batch), batch),
    )
    monkeypatch.setattr(ReferenceAdapter, "requests_scheduled", lambda _: made.scheduled)
    return made


def compared(rig: Any) -> tuple[int, int]:
    rig.canary.counter_reader.drain(rig.canary.step, 1.0)
    counters = rig.canary.state.counters
    return int(counters[layout.COUNT_TOKENS_COMPARED]), int(counters[layout.COUNT_TOKENS_LEFT_OUT])


@pytest.mark.parametrize("backend", ["torch", "numba"])
@pytest.mark.parametrize("behind", [0, 1, 5])
def test_every_scheduled_request_is_compared(make_rig, scheduler, backend: str, behind: int) -> None:
    """A scheduler may know of its newest tokens a step later, or some steps."""
    scheduler.known = lambda tokens, stop: max(1, min(len(tokens), stop) - behind)
    rig = make_rig(backend=backend)
    rig.run(80)
    rig.canary.check_everything()
    assert compared(rig) == (scheduler.scheduled, 0)
    assert rig.canary.verdict() == (State.OK, ())


def test_entries_of_which_something_is_known_are_due_a_comparison(make_rig, scheduler, monkeypatch) -> None:
    """A group whose entries are not the forward's tokens, but are known to the scheduler all the same."""
    complete = Scheduler.complete

    def own_entries(*given: Any) -> StepView:
        view = complete(*given)
        names = [each.name for each in fields(GroupTokens) if each.name not in ("expected_ids", "rows")]
        entries = GroupTokens(**{name: getattr(view, name) for name in names})
        return replace(view, groups={"full": replace(view.groups["full"], tokens=entries)})

    monkeypatch.setattr(Scheduler, "complete", own_entries)
    rig = make_rig()
    rig.run(60)
    rig.canary.check_everything()
    assert compared(rig) == (scheduler.scheduled, 0)
    assert rig.canary.verdict() == (State.OK, ())


def test_one_wrong_token_is_found_in_the_same_forward(make_rig, scheduler) -> None:
    rig = make_rig(idle_sweep=False, patrol_budget="off")
    rig.run(20)
    scheduler.garble = lambda tokens: [tokens[0] ^ 1, *tokens[1:]] if tokens else tokens
    rig.run(1)
    rig.canary.check_everything()
    found = rig.canary.detach().groups["full"].violations
    assert found[Phase.TAIL][Reason.WRITE_TOKEN] > 0
    assert sum(found[Phase.TAIL].values()) == found[Phase.TAIL][Reason.WRITE_TOKEN]


def test_a_comparison_that_is_not_launched_is_missed(make_rig, scheduler, monkeypatch) -> None:
    rig = make_rig(idle_sweep=False, patrol_budget="off")
    rig.run(20)
    verify_rows = forward.verify_rows

    def head_only(backend, buffers, batch, phase) -> None:
        if phase is layout.Phase.HEAD:
            verify_rows(backend, buffers, batch, phase)

    monkeypatch.setattr(forward, "verify_rows", head_only)
    before = scheduler.scheduled
    rig.run(3)
    rig.canary.counter_reader.drain(rig.canary.step, 1.0)
    state, reasons = rig.canary.verdict()
    assert state is State.BLIND
    assert f"{NOT_CHECKED}, {scheduler.scheduled - before} requests" in reasons


def test_a_view_without_the_scheduler_s_tokens_is_missed(make_rig, scheduler, monkeypatch) -> None:
    rig = make_rig(idle_sweep=False, patrol_budget="off")
    rig.run(20)
    complete = Scheduler.complete
    monkeypatch.setattr(
        Scheduler, "complete",
        lambda *given: replace(complete(*given), known_lens=None, known_digests=None),
    )  # fmt: skip
    rig.run(3)
    rig.canary.counter_reader.drain(rig.canary.step, 1.0)
    state, reasons = rig.canary.verdict()
    assert state is State.BLIND
    assert any(NOT_CHECKED in reason for reason in reasons)


def test_a_forward_that_failed_is_due_none(make_rig, scheduler, monkeypatch) -> None:
    rig = make_rig(idle_sweep=False, patrol_budget="off", check_coverage_target=0.0)
    rig.run(20)
    model, failed = rig.engine.runner.model, []

    def fail(*_: Any, **__: Any) -> Any:
        failed.append(True)
        raise RuntimeError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(type(model), "forward", fail)
        with pytest.raises(RuntimeError, match="planted"):
            rig.run(1)
    assert failed
    rig.run(3)
    rig.canary.counter_reader.drain(rig.canary.step, 1.0)
    assert not any(NOT_CHECKED in reason for reason in rig.canary.verdict()[1])


def test_requests_that_are_left_out_are_a_debt(make_rig, scheduler) -> None:
    rig = make_rig(idle_sweep=False, patrol_budget="off")
    rig.run(20)
    scheduler.known = lambda tokens, stop: -1
    rig.run(10)
    rig.canary.counter_reader.drain(rig.canary.step, 1.0)
    state, reasons = rig.canary.verdict()
    assert state is State.DEGRADED
    assert any(LEFT_OUT in reason for reason in reasons)
    assert compared(rig)[1] > 0
