"""Faults from outside the canary, planted in a running engine: the checks that must see them name them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from canary_obs.vocabulary import Part, Phase, Reason, State
from tests.engines.sglang.real.planted import (
    cached_slot,
    change_token,
    flip_bit,
    hand_out_twice,
    once,
    row,
    serve,
    shift_position,
    swap_entries,
    swap_window_slots,
    take_entry,
    unmap_window_slot,
    window_slot,
    write_elsewhere,
)
from tests.engines.sglang.real.rig import Rig
from tests.engines.sglang.real.traffic import prompts

_PLANTED: dict[str, tuple[Callable[..., None], set[Reason]]] = {
    "two entries swapped": (swap_entries, {Reason.POSITION, Reason.CHAIN}),
    "entry of another request": (take_entry, {Reason.CHAIN}),
    "slot handed out twice": (hand_out_twice, {Reason.CHAIN}),
}
_GIVEN: dict[str, tuple[Callable[..., None], set[Reason]]] = {
    "position shifted": (shift_position, {Reason.WRITE_POSITION}),
    "input token changed": (change_token, {Reason.WRITE_TOKEN}),
    "written one slot off": (write_elsewhere, {Reason.UNWRITTEN}),
}
_LOOPS = [pytest.param(True, id="normal"), pytest.param(False, id="overlap")]
_WINDOWS: dict[str, tuple[Callable[..., None], Reason]] = {
    "two window slots swapped": (swap_window_slots, Reason.POSITION),
    "no window slot": (unmap_window_slot, Reason.UNWRITTEN),
}


@pytest.mark.parametrize("plain", _LOOPS)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("fault", _WINDOWS)
def test_faults_of_the_windows(make_rig: Any, fault: str, page_size: int, plain: bool) -> None:
    plant, expected = _WINDOWS[fault]
    rig = make_rig("windows", page_size=page_size, disable_overlap_schedule=plain)
    serve(rig, plant)
    rig.settle()
    assert {violation.group for violation in rig.found} == {"swa"}
    assert expected in {violation.reason for violation in rig.found}
    assert {violation.phase for violation in rig.found} >= {Phase.HEAD, Phase.TAIL}


@pytest.mark.parametrize("layer", [0, 3])
@pytest.mark.parametrize("part", [Part.K, Part.V])
def test_a_bit_of_a_window_slot_flips(make_rig: Any, part: Part, layer: int) -> None:
    rig, slots = make_rig("windows"), []

    def flip(rig: Rig) -> None:
        slots.append(window_slot(rig))
        flip_bit(rig.runner.token_to_kv_pool.swa_kv_pool, part, layer, slots[0])

    serve(rig, flip, turns=1)
    (found,) = {(item.reason, item.group, item.part, item.slot) for item in rig.settle()}
    assert found == (Reason.KV_DATA, "swa", part, slots[0])


@pytest.mark.parametrize("plain", _LOOPS)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("fault", _PLANTED)
def test_faults_of_the_tables(make_rig: Any, fault: str, page_size: int, plain: bool) -> None:
    plant, expected = _PLANTED[fault]
    rig = make_rig(page_size=page_size, disable_overlap_schedule=plain)
    serve(rig, plant, turns=20)
    rig.settle()
    assert expected <= {violation.reason for violation in rig.found}
    assert {violation.phase for violation in rig.found} >= {Phase.HEAD}
    assert rig.canary.verdict()[0] is State.VIOLATED


@pytest.mark.parametrize("plain", _LOOPS)
@pytest.mark.parametrize("fault", _GIVEN)
def test_faults_of_the_inputs(make_rig: Any, fault: str, plain: bool) -> None:
    change, expected = _GIVEN[fault]
    rig = make_rig(disable_overlap_schedule=plain)
    serve(rig, lambda rig: once(rig, change))
    rig.settle()
    assert expected <= {violation.reason for violation in rig.found}
    assert rig.canary.verdict()[0] is State.VIOLATED


@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize(("model", "part"), [("llama", Part.K), ("llama", Part.V), ("latent", Part.K)])
def test_a_bit_of_a_running_request_flips(make_rig: Any, model: str, part: Part, layer: int) -> None:
    rig = make_rig(model)
    slots = []

    def flip(rig: Rig) -> None:
        slots.append(int(row(rig)[11]))
        flip_bit(rig.runner.token_to_kv_pool, part, layer, slots[0])

    serve(rig, flip, turns=1)
    (found,) = {(item.reason, item.part, item.slot) for item in rig.settle()}
    assert found == (Reason.KV_DATA, part, slots[0])


def test_a_bit_of_a_cached_slot_flips(make_rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but idle turns: the sweep that is due then finds it."""
    monkeypatch.setenv("KV_CANARY_IDLE_SWEEP_SECONDS", "0.01")
    monkeypatch.setenv("KV_CANARY_PATROL_BUDGET", "off")
    rig = make_rig(page_size=16)
    rig.generate(prompts(3))
    assert rig.settle() == []
    slot = cached_slot(rig)
    flip_bit(rig.runner.token_to_kv_pool, Part.V, 1, slot)
    rig.idle_until(lambda: bool(rig.found))
    assert {(item.reason, item.part, item.slot) for item in rig.found} == {(Reason.KV_DATA, Part.V, slot)}
    assert {item.phase for item in rig.found} == {Phase.SWEEP}
