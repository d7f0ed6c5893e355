"""KV that SGLang moves to host memory and a storage: records go along, and are compared when it is back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from canary_kernels import layout
from canary_obs.engines.sglang.scheduler_canary import attach_to_scheduler
from canary_obs.runtime.device.byte_address import locate_byte
from canary_obs.vocabulary import Cause, Phase, Reason, State
from tests.engines.sglang.real.tiers import (
    PROMPT,
    STORED,
    TIER,
    flip_in_file,
    flip_in_host,
    forget,
    generate,
    install,
    push_out,
    store,
    tier,
)
from tests.engines.sglang.real.traffic import storm


@pytest.fixture(scope="module", autouse=True)
def _host_memory() -> None:
    install()


@pytest.fixture
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("model", "policy", "page_size", "plain"),
    [
        ("llama", "write_through", 1, True),
        ("llama", "write_back", 16, False),
        ("windows", "write_through", 1, False),
        ("latent", "write_back", 16, True),
    ],
)
def test_a_storm(
    make_rig: Any, model: str, policy: str, page_size: int, plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = TIER | {
        "hicache_write_policy": policy, "page_size": page_size, "disable_overlap_schedule": plain,
    }  # fmt: skip
    rig = make_rig(model, **settings)
    rig.run(storm(rig, rounds=2))
    assert rig.settle() == []
    assert rig.canary.verdict() == (State.OK, ())
    assert tier(rig).compared > 100
    assert tier(rig).without == 0
    assert not rig.canary.health.faults
    for group in rig.adapter.groups:
        assert not any(rig.counters(group.name).unverified.values())
    monkeypatch.setenv("KV_CANARY_MODE", "none")
    without = make_rig(model, **settings)
    without.run(storm(without, rounds=2))
    assert without.answers == rig.answers


@pytest.mark.parametrize(("model", "group"), [("llama", "full"), ("latent", "full"), ("windows", "swa")])
def test_a_bit_flips_in_host_memory(make_rig: Any, model: str, group: str) -> None:
    """It is seen when the KV comes back, before the first forward reads it."""
    rig = make_rig(model, **TIER)
    rig.generate(PROMPT)
    push_out(rig)
    assert rig.settle() == []
    flipped = flip_in_host(rig, group)
    rig.generate({"again": PROMPT["kept"] + [7, 8]})
    found = rig.settle()
    assert {(item.reason, item.group) for item in found} == {(Reason.KV_DATA, group)}
    assert found[0].phase is Phase.HEAD
    assert 0 < len({item.slot for item in found}) <= flipped


def test_what_a_load_writes_over_is_compared_before(make_rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rig, damaged = make_rig(**TIER), list[int]()
    group, compare = rig.canary.state.by_name["full"], tier(rig)._compare_before

    def plant(transfers: Any) -> None:
        slots = transfers[0].device_indices.long()
        states = group.buffers.records[slots, layout.IDENTITY] >> 32 & layout.STATE_MASK
        damaged.append(int(slots[states.tolist().index(layout.RecordState.COMPLETE)]))
        locate_byte(group.view.sources[0], damaged[0], 3).flip(64)
        compare(transfers)

    rig.generate(PROMPT)
    push_out(rig)
    assert rig.settle() == []
    monkeypatch.setattr(tier(rig), "_compare_before", plant)
    rig.generate({"again": PROMPT["kept"] + [7, 8]})
    found = [(row.phase, row.reason, row.slot, row.peer) for row in rig.settle()]
    assert found == [(Phase.HEAD, Reason.KV_DATA, damaged[0], None)]


def test_a_bit_flips_in_the_storage(make_rig: Any, storage: Path) -> None:
    rig = make_rig(**TIER, **STORED)
    store(rig, storage)
    generate(rig, {"sound": PROMPT["kept"] + [7, 8]})
    assert rig.settle() == []
    assert rig.canary.verdict() == (State.OK, ())
    assert tier(rig).compared >= 240
    forget(rig)
    flip_in_file(sorted(storage.iterdir())[0])
    generate(rig, {"damaged": PROMPT["kept"] + [7, 8]})
    assert {(item.reason, item.group) for item in rig.settle()} == {(Reason.KV_DATA, "full")}
    assert len({item.slot for item in rig.found}) == 1


def test_what_another_canary_stored_is_not_called_checked(make_rig: Any, storage: Path) -> None:
    """No record came with it: its bytes get a baseline, and its slots count as unverified."""
    rig = make_rig(**TIER, **STORED)
    store(rig, storage)
    attach_to_scheduler(rig.scheduler, "another")
    rig.collect_from()
    generate(rig, {"again": PROMPT["kept"] + [7, 8]})
    assert rig.settle() == []
    assert tier(rig).without >= 240
    assert tier(rig).compared == 0
    assert rig.counters().unverified[Cause.BASELINE] > 240


def test_without_a_canary_nothing_of_it_is_left(make_rig: Any, storage: Path) -> None:
    rig = make_rig(**TIER, **STORED)
    controller = rig.scheduler.tree_cache.cache_controller
    pool = controller.mem_pool_host.anchor_entry.host_pool
    assert "alloc" in vars(pool)
    rig.close()
    assert "alloc" not in vars(pool)
    assert not {"submit_device_to_host", "submit_host_to_device"} & vars(controller.l2_transfer_engine).keys()
    assert "canary_obs" not in controller.page_set_func.__module__
