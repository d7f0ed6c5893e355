"""SGLang's unified memory: slots with virtual numbers, in bytes that full and window layers use in turn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
import torch

from canary_obs.engines.sglang.adapter import SglangAdapter
from canary_obs.vocabulary import ObserverPart, Part, Phase, Reason, State
from tests.engines.sglang.real import unified_memory
from tests.engines.sglang.real.planted import flip_bit, place_in_window, row, serve, swap_entries
from tests.engines.sglang.real.rig import Rig
from tests.engines.sglang.real.traffic import prompts, storm

_SMALL = {"max_total_tokens": 832}


@pytest.fixture
def make_unified(make_rig: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Rig]:
    unified_memory.install(monkeypatch)
    monkeypatch.setenv("SGLANG_SWA_EVICTION_INTERVAL", "4")
    return lambda model="windows", **settings: make_rig(model, **(unified_memory.SETTINGS | settings))


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Pages that SGLang has moved, by its own name of the part."""
    from sglang.srt.mem_cache import unified_memory_pool as pools

    found = Counter[str]()

    def counting(move: Any) -> Any:
        @wraps(move)
        def move_physical_pages(self: Any, tgt_pages: Any, *more: Any) -> Any:
            found[self._sub_pool_name] += tgt_pages.numel()
            return move(self, tgt_pages, *more)

        return move_physical_pages

    for kind in (pools.UnifiedMHATokenToKVPool, pools.UnifiedMambaPool):
        monkeypatch.setattr(kind, "move_physical_pages", counting(kind.move_physical_pages))
    return found


@pytest.mark.parametrize(
    ("model", "where"),
    [
        ("windows", {"page_size": 1, "enable_mixed_chunk": True}),
        ("windows", {"page_size": 16, "disable_overlap_schedule": False}),
        ("states", {"max_mamba_cache_size": 32}),
    ],
    ids=["windows-1", "windows-16-overlap", "states"],
)
def test_a_storm(
    make_unified: Any, moved: Counter[str], model: str, where: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.managers import scheduler

    monkeypatch.setattr(scheduler, "TEST_RETRACT", True)
    monkeypatch.setattr(scheduler, "TEST_RETRACT_INTERVAL", 16)
    rig = make_unified(model, **_SMALL, **where)
    rig.run(storm(rig, rounds=1))
    groups = [group.name for group in rig.adapter.groups]
    assert groups == ["full", "swa" if model == "windows" else "state"]
    assert min(moved["full"], moved["swa" if model == "windows" else "mamba"]) > 0
    assert rig.settle() == []
    assert rig.canary.verdict() == (State.OK, ())
    assert rig.canary.state.coverage == 1.0
    assert min(checked := rig.canary.forwards.checked.values()) == max(checked) > 60
    assert rig.counters("full").verified[Phase.HEAD] > 20_000
    for group in groups:
        counters = rig.counters(group)
        assert counters.verified[Phase.TAIL] > 300
        assert counters.verified[Phase.SWEEP]
        assert counters.hashed[Phase.HEAD]
        assert counters.hashed[Phase.SWEEP]
        assert counters.hashed[Phase.PATROL]
        assert not any(counters.unverified.values())
    monkeypatch.setenv("KV_CANARY_MODE", "none")
    plain = make_unified(model, **_SMALL, **where)
    plain.run(storm(plain, rounds=1))
    assert plain.answers == rig.answers


def test_what_is_in_use_and_whose_it_is(make_unified: Any) -> None:
    rig = make_unified(page_size=16)

    def look(rig: Rig) -> None:
        adapter, virtual = rig.adapter, row(rig)[:8].long()
        allocator = rig.runner.token_to_kv_pool_allocator
        slots = allocator.translate_kv_loc(virtual)
        assert set(slots.tolist()) <= set(adapter.slots_in_use("full").tolist())
        windowed = allocator.translate_loc_from_full_to_swa(row(rig)[place_in_window(rig) :][:2].long())
        assert set(windowed.tolist()) <= set(adapter.slots_in_use("swa").tolist())
        (request, *_) = rig.running(3, 6)
        assert request.rid in adapter.holders("full", int(slots[0]))
        assert request.rid in adapter.holders("swa", int(windowed[0]))

    serve(rig, look)
    assert rig.settle() == []
    assert rig.adapter.reserve_scratch_slot() == ("full", 15)
    tokens = rig.adapter.window_tokens()
    assert tokens is not None
    assert (tokens.full, tokens.windowed) == (("full",), ("swa",))
    assert 0 < tokens.out_of_window + tokens.diverging <= rig.adapter.slots_in_use("full").numel()


def _exchange_pages(rig: Rig) -> None:
    """Two virtual numbers exchange their places."""
    table, pair = rig.runner.token_to_kv_pool_allocator.full_v2p_page_table, row(rig)[[5, 9]].long()
    table[pair] = table[pair.flip(0)]


def _exchange_window_pages(rig: Rig) -> None:
    table = rig.runner.token_to_kv_pool_allocator.swa_v2p_page_table
    pair = row(rig)[place_in_window(rig) :][:2].long()
    table[pair] = table[pair.flip(0)]


def _lose_window_page(rig: Rig) -> None:
    """A token within the window has no place any more."""
    table = rig.runner.token_to_kv_pool_allocator.swa_v2p_page_table
    table[int(row(rig)[place_in_window(rig)])] = -1


_PLANTED: dict[str, tuple[Callable[[Rig], None], str, Reason]] = {
    "two entries swapped": (swap_entries, "full", Reason.POSITION),
    "two places exchanged": (_exchange_pages, "full", Reason.POSITION),
    "two window places exchanged": (_exchange_window_pages, "swa", Reason.POSITION),
    "no window place": (_lose_window_page, "swa", Reason.UNWRITTEN),
}


@pytest.mark.parametrize("fault", _PLANTED)
def test_faults_of_the_tables(make_unified: Any, fault: str) -> None:
    plant, group, reason = _PLANTED[fault]
    rig = make_unified()
    serve(rig, plant)
    rig.settle()
    assert (group, reason) in {(item.group, item.reason) for item in rig.found}
    assert rig.canary.verdict()[0] is State.VIOLATED


@pytest.mark.parametrize("group", ["full", "swa"])
def test_a_bit_flips(make_unified: Any, group: str) -> None:
    rig, slots = make_unified(), []

    def flip(rig: Rig) -> None:
        pool, allocator = rig.runner.token_to_kv_pool, rig.runner.token_to_kv_pool_allocator
        virtual = row(rig)[place_in_window(rig)][None].long()
        translate = {"full": allocator.translate_kv_loc, "swa": allocator.translate_loc_from_full_to_swa}
        slots.append(int(translate[group](virtual)))
        flip_bit({"full": pool.full_kv_pool, "swa": pool.swa_kv_pool}[group], Part.V, 1, slots[0])

    serve(rig, flip, turns=1)
    (found,) = {(item.reason, item.group, item.part, item.slot) for item in rig.settle()}
    assert found == (Reason.KV_DATA, group, Part.V, slots[0])


@pytest.mark.parametrize("part", [Part.K, Part.V])
def test_a_bit_of_a_state_flips(make_unified: Any, part: Part) -> None:
    rig, slots = make_unified("states", max_mamba_cache_size=32), []

    def flip(rig: Rig) -> None:
        requests, (request, *_) = rig.runner.req_to_token_pool, rig.running(3, 6)
        slots.append(int(requests.mamba_allocator.translate(request.kv.mamba_pool_idx)))
        assert request.rid in rig.adapter.holders("state", slots[0])
        assert slots[0] in rig.adapter.slots_in_use("state").tolist()
        held = requests.mamba_pool.mamba_cache
        tensor = held.conv[0] if part is Part.K else held.temporal
        with torch.inference_mode():
            tensor[1, slots[0]].view(-1)[0] += 0.5

    serve(rig, flip, turns=1)
    found = {(item.reason, item.group, item.part, item.slot) for item in rig.settle()}
    assert found == {(Reason.KV_DATA, "state", part, slots[0])}


def test_a_bit_flips_in_what_is_then_moved(make_unified: Any, moved: Counter[str]) -> None:
    """The records go along: the copy is compared with what its original was."""
    rig, before = make_unified(page_size=16), list[int]()

    def free_and_move(rig: Rig) -> None:
        from sglang.srt.mem_cache.allocator.unified_sub_pool import MultiEndedAllocator

        allocator: MultiEndedAllocator = rig.runner.token_to_kv_pool_allocator.full_attn_allocator
        pages = allocator.virtual_to_physical[row(rig)[:32].long() // 16].unique()
        flip_bit(rig.runner.token_to_kv_pool.full_kv_pool, Part.K, 0, int(pages[0]) * 16 + 3)
        free = allocator.take_physical_pages(1)
        assert free is not None
        before.append(moved["full"])
        allocator._move_pages_and_rebind(pages[:1], free)
        allocator.physical_to_virtual[pages[:1]] = -1

    serve(rig, free_and_move, turns=1)
    assert moved["full"] > before[0]
    rig.settle()
    assert {(item.group, item.reason, item.part) for item in rig.found} == {("full", Reason.KV_DATA, Part.K)}


@pytest.mark.parametrize("lost", ["bytes", "announcement"])
def test_a_move_that_copies_nothing_or_that_nobody_hears_of(
    make_unified: Any, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.mem_cache import unified_memory_pool

    rig, calls = make_unified(**_SMALL), list[int]()
    if lost == "bytes":
        copy = unified_memory_pool.copy_pages

        def copy_pages(raw: Any, target: Any, source: Any, *more: Any) -> Any:
            calls.append(target.numel())
            return copy(raw, target, source, *more) if len(calls) != 2 else None

        monkeypatch.setattr(unified_memory_pool, "copy_pages", copy_pages)
    else:
        for pool in (rig.runner.token_to_kv_pool.full_kv_pool, rig.runner.token_to_kv_pool.swa_kv_pool):
            wrapped = vars(pool).pop("move_physical_pages")
            assert wrapped is not None
    rig.run(storm(rig, rounds=1))
    rig.settle()
    reasons = {item.reason for item in rig.found}
    assert (Reason.KV_DATA if lost == "bytes" else Reason.UNWRITTEN) in reasons


def test_a_flush_gives_up_every_slot(make_unified: Any) -> None:
    from sglang.srt.managers.io_struct import FlushCacheReqInput

    rig = make_unified()
    rig.generate(prompts(4))
    assert rig.adapter.slots_in_use("full").numel()
    rig.run([[FlushCacheReqInput()], (), ()])
    assert not rig.adapter.slots_in_use("full").numel()
    with torch.inference_mode():
        rig.runner.token_to_kv_pool.unified_buffer._raw.fill_(7)  # nobody's bytes
    assert rig.settle() == []
    rig.generate({f"again.{name}": prompt for name, prompt in prompts(4).items()})
    assert rig.settle() == []
    assert rig.canary.verdict() == (State.OK, ())


@pytest.mark.parametrize("model", ["windows", "states"])
@pytest.mark.parametrize("handled", [True, False])
def test_records_that_become_unknown(
    make_unified: Any, monkeypatch: pytest.MonkeyPatch, model: str, handled: bool
) -> None:
    """A slot that holds nothing of a group gets no baseline there: the other one may write its bytes."""
    if not handled:
        monkeypatch.setattr(SglangAdapter, "foreign_slots", lambda *_: None)
    rig = make_unified(model, **_SMALL, **({"max_mamba_cache_size": 32} if model == "states" else {}))

    def lose(rig: Rig) -> None:
        rig.canary.fault(ObserverPart.ANNOUNCE, RuntimeError("planted"))
        rig.canary.check_everything()  # takes all baselines

    serve(rig, lose)
    rig.run(storm(rig, rounds=1))
    assert (rig.settle() == []) is handled
