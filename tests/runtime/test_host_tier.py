"""Records move with the pages of the host tier, so that damage in host memory is detected before use."""

from __future__ import annotations

import numpy as np
import torch

from canary_obs.records import Snapshot
from canary_obs.reference_engine.engine import Engine
from canary_obs.reference_engine.scheduling.request import Sampling
from canary_obs.reference_engine.settings import tiny
from canary_obs.vocabulary import Cause, Completeness, Phase, Reason, State
from tests.reference_engine.test_host_tier import TIERED
from tests.reference_engine.workloads import answer, drain
from tests.runtime.conftest import MakeRig, Rig
from tests.sizes import sized


def violations(final: Snapshot) -> int:
    return sum(sum(by.values()) for by in final.groups["full"].violations.values())


def offloaded(rig: Rig) -> None:
    for number in range(4):
        answer(rig.engine, number)
    assert rig.engine.scheduler.host_tier is not None
    assert len(rig.engine.scheduler.host_tier) > 10


def test_reload_with_records_is_verified(make_rig: MakeRig) -> None:
    rig = make_rig(engine=TIERED)
    for _ in range(3):
        offloaded(rig)
    rig.canary.check_everything()
    final = rig.canary.detach()
    group = final.groups["full"]
    assert rig.engine.statistics.reloaded_slots > 300
    assert group.hashed[Phase.HEAD] >= rig.engine.statistics.reloaded_slots
    assert group.unverified.get(Cause.ADOPTED, 0) == 0
    assert violations(final) == 0


def test_a_bit_flipped_in_host_memory_is_detected_before_its_first_use(make_rig: MakeRig) -> None:
    rig = make_rig(engine=TIERED)
    offloaded(rig)
    tier = rig.engine.scheduler.host_tier
    assert tier is not None
    step = rig.canary.step
    for page in tier._pages.values():
        page.bytes[1].view(torch.uint8).view(-1)[5] ^= 8
    answer(rig.engine, 0)
    rig.canary.check_everything()
    violations = rig.canary.detach().groups["full"].violations
    assert violations[Phase.HEAD][Reason.KV_DATA] >= 1
    assert rig.engine.statistics.reloaded_slots >= 1
    assert rig.canary.step > step


def test_a_page_loaded_into_the_wrong_slots_is_detected(make_rig: MakeRig) -> None:
    rig = make_rig(engine=TIERED)
    offloaded(rig)
    tier = rig.engine.scheduler.host_tier
    assert tier is not None
    pages = list(tier._pages.values())
    one, other = pages[0], pages[1]
    held = tuple(tensor.clone() for tensor in one.bytes)
    for mine, theirs in zip(one.bytes, other.bytes, strict=True):
        mine.copy_(theirs)
    for mine, kept in zip(other.bytes, held, strict=True):
        mine.copy_(kept)
    for number in range(4):
        answer(rig.engine, number)
    rig.canary.check_everything()
    assert rig.canary.detach().groups["full"].violations[Phase.HEAD][Reason.KV_DATA] >= 1


def test_reload_without_records_gets_a_baseline(make_rig: MakeRig) -> None:
    rig = make_rig(engine=TIERED)
    offloaded(rig)
    hooks = rig.canary._adapter._tier_hooks  # type: ignore[attr-defined]
    hooks._records.clear()
    answer(rig.engine, 0)
    rig.canary.check_everything()
    final = rig.canary.detach()
    assert final.groups["full"].unverified[Cause.BASELINE] > 0
    assert final.groups["full"].unverified[Cause.ADOPTED] == 0
    assert violations(final) == 0


def test_traffic_over_the_tier_is_clean(make_rig: MakeRig) -> None:
    rig = make_rig(engine={"page_size": 4, "host_pages": 200})
    rig.run(sized(600, 300))
    rig.finish_requests()
    rig.canary.check_everything()
    assert rig.engine.statistics.reloaded_slots > 100
    assert rig.canary.verdict()[0] is State.OK
    assert violations(rig.canary.detach()) == 0


def test_what_a_load_writes_over_is_compared_before_and_its_readers_are_listed(make_rig: MakeRig) -> None:
    """A page that was partly filled is cached by nobody: a load is the last that meets what is in it."""
    rig = make_rig(engine=TIERED, patrol_budget="off", idle_sweep=False)
    engine, heard, filled = rig.engine, [], set[int]()
    rig.canary.taint.send = lambda message: heard.append(message) is None
    offloaded(rig)
    tier = engine.scheduler.host_tier
    assert tier is not None
    load = tier.load
    tier.load = lambda pages, slots: (filled.update(slots.tolist()), load(pages, slots))[1]  # type: ignore[method-assign]
    prompt, sampling = np.arange(100, 160, dtype=np.int32), Sampling(max_tokens=4, stop_at_eos=False)
    reader = engine.add_request(prompt, sampling)
    while len(reader.output) < 2:
        engine.step()
    slot = int(reader.slots[reader.computed - 1])
    engine.runner.pool.stores[0].tensors()[0][slot].view(torch.uint8).view(-1)[3] ^= 8
    drain(engine)
    scheduler = engine.scheduler
    pages = scheduler.take(scheduler.allocator.free_pages + scheduler.cache.evictable // 4)
    assert pages is not None
    own = pages // 4 == slot // 4
    scheduler.allocator.free(np.concatenate([pages[~own], pages[own]]))  # what is freed last is given first
    assert not heard
    assert answer(engine, 0) == answer(Engine(tiny(seed=3, **TIERED)), 0)
    assert slot in filled
    rig.canary.check_everything()
    found = rig.canary.detach().groups["full"].violations
    assert found[Phase.HEAD][Reason.KV_DATA] == 1
    read = {row.request: row.derived for one in heard for row in one.requests}
    assert {one.slot for one in heard} == {slot}
    assert read[reader.id] is False


def test_who_loads_what_was_computed_from_damage_is_listed(make_rig: MakeRig) -> None:
    """Damage is found, and put back by hand; what was computed from it comes back from the host."""
    rig = make_rig(engine=TIERED, patrol_budget="off", idle_sweep=False)
    engine, heard = rig.engine, []
    rig.canary.taint.send = lambda message: heard.append(message) is None

    def ask(name: str, length: int) -> None:
        prompt, sampling = np.arange(100, 100 + length, dtype=np.int32), Sampling(max_tokens=4)
        engine.add_request(prompt, sampling, name)
        drain(engine)

    ask("writer", 24)
    slot = int(engine.scheduler.match(np.arange(100, 124, dtype=np.int32))[0][5])
    byte = engine.runner.pool.stores[0].tensors()[0][slot].view(torch.uint8).view(-1)[3:4]
    byte ^= 8
    ask("reader", 60)
    rig.canary.check_everything()
    byte ^= 8
    offloaded(rig)
    reloaded = engine.statistics.reloaded_slots
    ask("loader", 60)
    assert engine.statistics.reloaded_slots - reloaded >= 56
    rig.canary.check_everything()
    read = {row.request: row.derived for one in heard for row in one.requests}
    assert read.keys() == {"writer", "reader", "loader"}
    assert {one.completeness for one in heard} == {Completeness.KNOWN}
