"""DeepSeek-V4's pools: each sub-pool is a group of its own, or is named with the reason why it is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from canary_obs.engines.sglang.scheduler_canary import attach_to_scheduler
from canary_obs.vocabulary import Phase, Reason, State
from tests.engines.perturbed import PERTURB
from tests.engines.sglang.real.deepseek_v4 import PAGE, add_pools, make_pool, put_rows, row
from tests.engines.sglang.real.index_keys import put_keys
from tests.engines.sglang.real.perturbed import check_injections, inject_into
from tests.engines.sglang.real.rig import Rig
from tests.engines.sglang.real.traffic import prompts, storm

_SMALL: dict[str, Any] = {
    "max_total_tokens": 2560, "page_size": PAGE, "chunked_prefill_size": PAGE, "enable_mixed_chunk": True,
}  # fmt: skip
_ROWS = {"swa": "swa_kv_pool", "c4": "c4_kv_pool", "c128": "c128_kv_pool"}


def test_a_storm_over_all_sub_pools(make_rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    add_pools(monkeypatch.setattr)
    rig = make_rig("windows", **_SMALL, disable_overlap_schedule=False)
    assert [group.name for group in rig.adapter.groups] == ["full", "swa", "c4", "c4_indexer", "c128"]
    rig.run(storm(rig, rounds=1, count=12))
    assert rig.settle() == []
    state, reasons = rig.canary.verdict()
    assert state is State.DEGRADED
    told = [reason for reason in reasons if "of KV bytes protected" not in reason]
    assert [reason.partition(" (")[0] for reason in told] == ["states of compression are not checked"]
    for group, least in (("full", 5000), ("swa", 5000), ("c4", 1000), ("c4_indexer", 1000), ("c128", 20)):
        verified = rig.counters(group).verified
        assert verified[Phase.HEAD] > least, (group, verified)
        assert verified[Phase.SWEEP], (group, verified)
    _check_the_stand_in()
    monkeypatch.setenv("KV_CANARY_MODE", "none")
    plain = make_rig("windows", **_SMALL, disable_overlap_schedule=False)
    plain.run(storm(plain, rounds=1, count=12))
    assert plain.answers == rig.answers


def _check_the_stand_in() -> None:
    """It writes as the pools themselves do, by a kernel that Triton interprets here."""
    real, written = (make_pool(4 * PAGE, 2 * PAGE) for _ in range(2))
    rows, slots = row(torch.randn(3, 64)), torch.tensor([3, PAGE + 5, 2 * PAGE - 1])
    for inner, ratio in (("swa_kv_pool", 1), ("c4_kv_pool", 4), ("c128_kv_pool", 128)):
        own = slots // ratio
        getattr(real, inner).set_key_buffer(0, own, rows)
        put_rows(getattr(written, inner), 0, own, rows)
        assert getattr(real, inner).kv_buffer[0].any()
        assert torch.equal(getattr(real, inner).kv_buffer[0], getattr(written, inner).kv_buffer[0])
    keys, scales = torch.randn(3, 128).to(torch.float8_e4m3fn), torch.rand(3, 1)
    pages = written.c4_indexer_kv_pool.index_k_with_scale_buffer[0]
    real.c4_indexer_kv_pool.set_index_k_scale_buffer(0, slots // 4, keys, scales)
    put_keys(pages, PAGE // 4, slots // 4, keys, scales)
    assert pages.any()
    assert torch.equal(real.c4_indexer_kv_pool.index_k_with_scale_buffer[0], pages)


def test_a_bit_of_each_sub_pool_flips(make_rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    add_pools(monkeypatch.setattr)
    rig = make_rig("windows", **_SMALL)
    rig.generate({name: (prompt * 20)[:600] for name, prompt in prompts(2).items()}, 4)  # whole pages
    pools = rig.runner.token_to_kv_pool
    for group, inner in _ROWS.items():
        pool = getattr(pools, inner)
        _flip(rig, group, pool.kv_buffer[1], int(pool.page_size), 576, 8)
    keys = pools.c4_indexer_kv_pool
    _flip(rig, "c4_indexer", keys.index_k_with_scale_buffer[1], int(keys.page_size), 128, 4)


def _flip(rig: Rig, group: str, pages: torch.Tensor, size: int, data: int, scales: int) -> None:
    """A bit of an element, and one of a scale, of a slot in the prefix cache."""
    slot = int(rig.adapter.prefix_cache.cached(group, unlocked_only=True).slots[-1])
    page, place = divmod(slot, size)
    for byte in (place * data + 7, size * data + place * scales + 2):
        with torch.inference_mode():
            pages.view(torch.uint8)[page, byte] ^= 1 << 3
            rig.settle()
            pages.view(torch.uint8)[page, byte] ^= 1 << 3
        found = {(each.group, each.slot, each.reason) for each in rig.found}
        assert found == {(group, slot, Reason.KV_DATA)}
        rig.found.clear()


def test_every_injection_is_accounted_for(make_rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All modes at once, in each sub-pool. Entries hold no tokens of the forward that could be exchanged."""
    from sglang.srt.managers.io_struct import FlushCacheReqInput

    add_pools(monkeypatch.setattr)
    inject_into("c4", monkeypatch)
    rig = make_rig("windows", **_SMALL)
    for group in ("c4", "c4_indexer", "c128"):
        monkeypatch.setenv(f"{PERTURB}_GROUP", group)
        rig.run([[FlushCacheReqInput()], (), ()])
        attach_to_scheduler(rig.scheduler, "perturbed")
        rig.collect_from()
        rig.found.clear()
        check_injections(rig, group, "the group's entries are not the tokens of the forward")
