"""A write that is left out in one layer, and a first write that is left out, are found by rotation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from torch import Tensor

from canary_kernels import layout
from canary_kernels.layer_write import check_layer, note_layer
from canary_obs.reference_engine import settings
from canary_obs.vocabulary import State
from tests.sizes import sized

LOST = layout.lane(layout.Phase.TAIL, layout.Reason.LOST_WRITE)


def leave_out(rig, *, layers: Callable[[int], bool]) -> None:
    """The engine's attention leaves out the store of KV in some layers, from now on."""
    pool = rig.engine.runner.pool
    write = pool.write

    def partly(layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        if not layers(layer):
            write(layer, slots, key, value)

    pool.write = partly


def lost(rig) -> int:
    return int(rig.canary.state.counters.view(-1, layout.COUNTER_WORDS)[:, LOST].sum())


@pytest.mark.parametrize(
    ("layer", "backend"),
    [(1, "numba"), (2, "torch"), (3, "numba"), *sized([(1, "torch"), (2, "numba"), (3, "torch")], [])],
)
def test_a_layer_that_is_never_written_is_found_within_as_many_forwards(make_rig, layer, backend) -> None:
    layers = 4
    shape = replace(settings.tiny().shape, layers=layers)
    rig = make_rig(
        backend=backend, engine={"shape": shape}, idle_sweep=False, patrol_budget="off", layer_data=True
    )
    rig.run(100)  # slots are used again, by other tokens
    assert rig.canary.verdict() == (State.OK, ())
    leave_out(rig, layers=lambda number: number == layer)
    forwards = 0
    while not lost(rig):
        rig.run(1)
        forwards += 1
        assert forwards < 20
    # One more turn of the rotation where the forward's slots held no other token before.
    assert forwards <= 2 * layers
    rig.run(3)
    assert rig.canary.verdict()[0] is State.VIOLATED


@pytest.mark.parametrize("left_out", [range(2), range(1, 2)], ids=["every layer", "one layer"])
def test_a_first_write_has_the_untouched_pool_as_its_witness(make_rig, left_out) -> None:
    rig = make_rig(idle_sweep=False, patrol_budget="off", layer_data=True)
    leave_out(rig, layers=lambda number: number in left_out)
    rig.run(2)
    assert lost(rig) > 0


@pytest.mark.parametrize("model", ["llama", "swa", "compressed", "mla", "int8"])
def test_clean_engines_lose_no_write(make_rig, model) -> None:
    rig = make_rig(model=model, idle_sweep=False, patrol_budget="off", layer_data=True)
    rig.run(80)
    assert rig.canary.verdict() == (State.OK, ())
    rows = rig.canary.state.counters.view(-1, layout.COUNTER_WORDS)
    for group, row in zip(rig.canary.state.groups, rows, strict=True):
        assert (row[layout.COUNT_LAYER_CHECKED] > 0) == (group.layers.num_layers > 0)


def check_next_layer(group, slots) -> None:
    layer, witness = group.layers.next_layer(), group.layers.witness
    note_layer(group.backend, group.buffers, layer, witness, slots)
    assert group.layers.noted_layer() is layer
    check_layer(group.backend, group.buffers, layer, witness, slots)


def test_the_same_prompt_into_the_same_slots_is_no_lost_write(make_rig) -> None:
    """Bytes that stay as they were are right where the token did."""
    rig = make_rig(idle_sweep=False, patrol_budget="off", layer_data=True)
    group = rig.canary.state.groups[0]
    rig.run(60)
    slots = group.slots_between(0, group.view.num_slots)
    for _ in range(4):  # every layer: the records are those of the bytes
        check_next_layer(group, slots)
    group.forget(slots)  # nothing is known of the bytes, which stay
    for _ in range(4):
        check_next_layer(group, slots)
    assert lost(rig) == 0
