"""Faults from outside the canary, planted in a running engine: the checks that must see them name them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch

from canary_obs.vocabulary import Part, Phase, Reason, State
from tests.engines.sglang.real.rig import Rig
from tests.engines.sglang.real.traffic import prompts

_DECODED = 6  # tokens of each request when a fault is planted


def serve(rig: Rig, plant: Callable[[Rig], object], turns: int = 4) -> None:
    """Let requests decode, plant a fault between two turns of the loop, and let it turn on for a while."""

    def script() -> Iterator[Iterable[Any]]:
        yield [rig.request(name, prompt, 60) for name, prompt in prompts(3).items()]
        while len(rig.running(3, _DECODED)) < 3:
            yield ()
        plant(rig)
        yield from [()] * turns

    rig.run(script())


def once(rig: Rig, change: Callable[[Rig, Any], None]) -> None:
    """Change the next batch that decodes, before the model runner is given it."""
    given = rig.runner.forward

    def forward(batch: Any, *args: Any, **kwargs: Any) -> Any:
        rig.runner.forward = given
        change(rig, batch)
        return given(batch, *args, **kwargs)

    rig.runner.forward = forward


def row(rig: Rig, place: int = 0) -> Any:
    """The table's row of a request that decodes."""
    return rig.table[rig.running(3, _DECODED)[place].kv.req_pool_idx]


def swap_entries(rig: Rig) -> None:
    """Two entries of one request change places."""
    entries = row(rig)
    entries[[5, 9]] = entries[[9, 5]]


def take_entry(rig: Rig) -> None:
    """A request reads a slot of another one, past the prefix that they share."""
    mine, other = rig.running(3, _DECODED)[:2]
    last = len(mine.origin_input_ids) - 2
    rig.table[mine.kv.req_pool_idx, last] = rig.table[other.kv.req_pool_idx, len(other.origin_input_ids) - 2]


def hand_out_twice(rig: Rig) -> None:
    """The allocator gives a slot, or page, of a running request to whoever asks next."""
    allocator = rig.runner.token_to_kv_pool_allocator
    page = row(rig)[len(rig.running(3, _DECODED)[0].origin_input_ids) - 2] // allocator.page_size
    free = torch.cat([page.reshape(1).to(allocator.free_pages.dtype), allocator.free_pages])
    allocator.free_pages = free


def shift_position(rig: Rig, batch: Any) -> None:
    """One request is computed as if it were one token further."""
    batch.positions = batch.positions.clone()
    batch.positions[0] += 1


def change_token(rig: Rig, batch: Any) -> None:
    """The model is given another token than was sampled."""
    batch.input_ids = batch.input_ids.clone()
    batch.input_ids[0] = (batch.input_ids[0] + 1) % 1000


def write_elsewhere(rig: Rig, batch: Any) -> None:
    """The new token's KV is written to a slot that another token has."""
    batch.out_cache_loc = batch.out_cache_loc.clone()
    batch.out_cache_loc[0] = rig.table[batch.req_pool_indices[0], 7]


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


def swap_window_slots(rig: Rig) -> None:
    """Two entries of the mapping from full slots to window slots change places."""
    own = rig.runner.token_to_kv_pool_allocator.full_to_swa_index_mapping
    pair = row(rig)[place_in_window(rig) :][:2].long()
    own[pair] = own[pair.flip(0)]


def unmap_window_slot(rig: Rig) -> None:
    """A token within the window has no window slot any more."""
    own = rig.runner.token_to_kv_pool_allocator.full_to_swa_index_mapping
    own[int(row(rig)[place_in_window(rig)])] = 0


def place_in_window(rig: Rig) -> int:
    """A position that the longest request still reads some turns later."""
    request = rig.running(3, _DECODED)[0]
    return len(request.origin_input_ids) - 4


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
        own = rig.runner.token_to_kv_pool_allocator.full_to_swa_index_mapping
        slots.append(int(own[int(row(rig)[place_in_window(rig)])]))
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
    walk = rig.scheduler.tree_cache.tree_core.walk_for_kv_canary(unlocked_only=True, swa_resident_only=False)
    slot = int(walk.slot_indices[-1])
    flip_bit(rig.runner.token_to_kv_pool, Part.V, 1, slot)
    rig.idle_until(lambda: bool(rig.found))
    assert {(item.reason, item.part, item.slot) for item in rig.found} == {(Reason.KV_DATA, Part.V, slot)}
    assert {item.phase for item in rig.found} == {Phase.SWEEP}


def flip_bit(pool: Any, part: Part, layer: int, slot: int) -> None:
    if hasattr(pool, "kv_buffer"):
        buffers = pool.kv_buffer
    else:
        buffers = pool.k_buffer if part is Part.K else pool.v_buffer
    with torch.inference_mode():
        buffers[layer][slot].view(torch.uint8).view(-1)[5] ^= 16
