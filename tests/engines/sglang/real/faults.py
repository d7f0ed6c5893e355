"""The faults that both canaries are shown, each with the engine it is planted in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from canary_obs.vocabulary import Part
from tests.engines.sglang.real import planted
from tests.engines.sglang.real.planted import flip_bit, full_pool, once, row, serve
from tests.engines.sglang.real.rig import Rig
from tests.engines.sglang.real.sglang_canary import OwnLog, logged_rows, most_rows
from tests.engines.sglang.real.traffic import prompts

TURNS = 8  # of the loop after a fault


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault, and the traffic it is planted in."""

    name: str
    plant: Callable[[Rig], object]
    cached: bool = False  # planted in what earlier requests left in the cache; else while requests decode
    run: Callable[[Rig, OwnLog], None] | None = None  # traffic of its own, which plants it
    model: str = "llama"
    settings: dict[str, Any] = field(default_factory=dict)
    # Whether ours names each slot that SGLang's does, which takes a request's length from the positions, and
    # names what follows a bad write; of a row with another request's tokens ours names one slot.
    same_slots: bool = True


def _table(name: str, plant: Callable[[Rig], object], model: str = "llama", **settings: Any) -> Fault:
    """Planted between two turns of the loop."""
    return Fault(name=name, plant=plant, model=model, settings=settings)


def _given(name: str, change: Callable[[Rig, Any], None], *, same_slots: bool = True) -> Fault:
    """What one forward is given."""
    return Fault(name=name, plant=lambda rig: once(rig, change), same_slots=same_slots)


def _bit(part: Part, layer: int, model: str = "llama") -> Fault:
    return _table(
        f"a bit of {part.name} in layer {layer}",
        lambda rig: flip_bit(full_pool(rig), part, layer, int(row(rig)[planted.LATE])),
        model,
    )


def _cached(part: Part, layer: int) -> Fault:
    def plant(rig: Rig) -> None:
        flip_bit(full_pool(rig), part, layer, planted.cached_slot(rig))

    return Fault(name=f"a bit of {part.name} in layer {layer}, cached slot", plant=plant, cached=True)


def _written(part: Part, layer: int) -> Fault:
    def flip(rig: Rig, batch: Any) -> None:
        flip_bit(full_pool(rig), part, layer, int(batch.out_cache_loc[0]))

    name = f"a bit of {part.name} in layer {layer}, slot just written"
    return _table(name, lambda rig: once(rig, flip, after=True))


def _flip_late(rig: Rig) -> None:
    flip_bit(full_pool(rig), Part.K, 0, int(row(rig)[planted.LATE]))


def _after_its_log_is_full(rig: Rig, own: OwnLog) -> None:
    """So many violations that SGLang's canary logs no more, then one of another kind."""

    def script() -> Iterator[Iterable[Any]]:
        yield [rig.request(name, prompt, 200) for name, prompt in prompts(3).items()]
        while len(rig.running(3, planted.DECODED)) < 3:
            yield ()
        for place in range(3):
            planted.shift_entries(rig, place)
        while logged_rows(rig.scheduler) <= most_rows(rig.scheduler):
            yield ()
        rig.found.clear()
        own.lines.clear()
        _flip_late(rig)
        yield from [()] * 8

    rig.run(script())


def serve_with(fault: Fault, rig: Rig, own: OwnLog) -> None:
    """The traffic of a fault, in which it is planted."""
    if fault.run is not None:
        fault.run(rig, own)
    elif fault.cached:
        rig.generate(prompts(3))
        fault.plant(rig)
        rig.generate(prompts(2, seed=9))
    else:
        serve(rig, fault.plant, TURNS)
        assert not hasattr(rig.runner.forward, "waits"), f"{fault.name}: no forward took it"


FAULTS = (
    _table("two table entries swapped", planted.swap_entries),
    _table("entry of another request", planted.take_entry),
    _table("entry lost (0)", planted.drop_entry),
    _table("entry repeated", planted.repeat_entry),
    _table("part of a row off by one", planted.shift_entries),
    _table("entry of a free slot", planted.point_at_free),
    _table("slot handed out twice", planted.hand_out_twice),
    _table("page handed out twice", planted.hand_out_twice, page_size=16),
    _given("rows of two requests exchanged", planted.exchange_rows, same_slots=False),
    _given("position + 1, one request", planted.shift_position, same_slots=False),
    _given("position + 1, all requests", planted.shift_positions, same_slots=False),
    _given("input token changed", planted.change_token),
    _given("tokens of two requests exchanged", planted.exchange_tokens),
    _given("KV written to another token's slot", planted.write_elsewhere, same_slots=False),
    _given("KV of two tokens written crosswise", planted.exchange_writes),
    _bit(Part.K, 0),
    _bit(Part.V, 0),
    _bit(Part.K, 1),
    _bit(Part.V, 2),
    _cached(Part.K, 0),
    _cached(Part.V, 1),
    _written(Part.K, 0),
    _written(Part.K, 2),
    _table(
        "another slot's KV, all layers",
        lambda rig: planted.copy_slot(full_pool(rig), int(row(rig)[5]), int(row(rig)[planted.LATE])),
    ),
    _table("window slots swapped", planted.swap_window_slots, "windows"),
    _table("no window slot", planted.unmap_window_slot, "windows"),
    _table(
        "a bit of K in the windows' first layer",
        lambda rig: flip_bit(rig.runner.token_to_kv_pool.swa_kv_pool, Part.K, 0, planted.window_slot(rig)),
        "windows",
    ),
    _table(
        "a bit of V in the windows' last layer",
        lambda rig: flip_bit(rig.runner.token_to_kv_pool.swa_kv_pool, Part.V, 3, planted.window_slot(rig)),
        "windows",
    ),
    _bit(Part.K, 0, "latent"),
    _table("two table entries swapped", planted.swap_entries, "latent"),
    Fault(name="a bit of K in layer 0, after 1024 violations", plant=_flip_late, run=_after_its_log_is_full),
)
