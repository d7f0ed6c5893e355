"""Drafts in an engine with the hooks of GPUs: its KV is protected, that of its draft models is left out."""

from __future__ import annotations

from typing import Any

import pytest

from canary_obs.engines.sglang import adapter, limits
from canary_obs.vocabulary import Part, Phase, Reason, State
from tests.engines.sglang.real.drafting import overlap
from tests.engines.sglang.real.perturbed import check_injections, inject_into
from tests.engines.sglang.real.planted import flip_bit, row, serve
from tests.engines.sglang.real.rig import Rig
from tests.engines.sglang.real.traffic import prompts

_TOKENS = 20
_LEFT_OUT = "layers of draft models are not checked"


@pytest.fixture(autouse=True)
def _gpus_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    overlap(monkeypatch)
    monkeypatch.setattr(adapter, "concurrent", lambda _: True)
    monkeypatch.setattr(adapter, "untried_on_gpus", lambda *_: None)  # of another version, with another tree
    monkeypatch.setattr(limits, "_WITH_DRAFTS", limits._WITH_DRAFTS_ON_GPUS)


@pytest.mark.parametrize(
    ("kind", "together"),
    [
        ("standalone", True), ("standalone", False), ("eagle", True), ("eagle3", True),
        ("adaptive eagle", True), ("mtp", True),
    ],
)  # fmt: skip
def test_a_sound_engine_that_drafts(
    make_drafting: Any, kind: str, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`together`: the next batch is launched before the scheduler knows what was accepted in this one."""
    rig = make_drafting(kind, disable_overlap_schedule=not together)
    assert rig.scheduler.enable_overlap is together
    answers = {seed: rig.generate(_asked(seed), _TOKENS) for seed in (0, 1)}
    assert rig.settle() == []
    state, reasons = rig.canary.verdict()
    assert state is State.DEGRADED
    assert all(_LEFT_OUT in reason or "of KV bytes protected" in reason for reason in reasons)
    assert [group.name for group in rig.adapter.groups] == ["full"]
    rig.assert_checked(["full"])
    assert rig.canary.health.faults == {}
    monkeypatch.setenv("KV_CANARY_MODE", "none")
    without = make_drafting(kind, disable_overlap_schedule=not together)
    assert answers == {seed: without.generate(_asked(seed), _TOKENS) for seed in (0, 1)}


@pytest.mark.parametrize("part", [Part.K, Part.V])
def test_a_bit_flips_in_what_was_accepted(make_drafting: Any, part: Part) -> None:
    rig, slots = make_drafting("standalone", disable_overlap_schedule=False), []

    def flip(rig: Rig) -> None:
        slots.append(int(row(rig)[11]))
        flip_bit(rig.runner.token_to_kv_pool, part, 1, slots[0])

    serve(rig, flip)
    (found,) = {(item.reason, item.group, item.part, item.slot) for item in rig.settle()}
    assert found == (Reason.KV_DATA, "full", part, slots[0])


def test_another_token_is_accepted_than_the_scheduler_is_told(make_drafting: Any) -> None:
    """Its KV is sound, and the links are: only the scheduler's own list says that it is another token."""
    rig, changed = make_drafting("standalone", disable_overlap_schedule=False), set[str]()

    def change(rig: Rig) -> None:
        request = rig.running(3, 6)[0]
        request.output_ids[-2] += 1
        changed.add(request.rid)

    serve(rig, change)
    found = rig.settle()
    assert {(item.reason, item.phase) for item in found} == {(Reason.WRITE_TOKEN, Phase.TAIL)}
    assert {item.request for item in found} == changed


def test_every_injection_is_accounted_for(make_drafting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    inject_into("full", monkeypatch)
    why = "fewer than two requests add one token each"
    rig = make_drafting("standalone", disable_overlap_schedule=False)
    check_injections(rig, "full", why, longest=160)


def _asked(seed: int) -> dict[str, list[int]]:
    return prompts(5, seed, longest=160)
