"""Lengths and tokens of a forward batch, by its mode."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from canary_obs.engines.sglang.batch_views import BatchViews
from canary_obs.engines.sglang.physical_slots import PhysicalSlots
from canary_obs.engines.sglang.window_slots import WindowSlots
from canary_obs.errors import UnsupportedEngine
from tests.engines.sglang.test_physical_slots import Allocator
from tests.engines.sglang.test_request_chains import Request, chain

TABLE = torch.arange(40, dtype=torch.int32).view(4, 10)


def views(windows: Any = None) -> BatchViews:
    groups: list[Any] = [
        SimpleNamespace(view=SimpleNamespace(name="full"), own_slots=None, ratio=1, by_row=None)
    ]
    if windows is not None:
        groups.append(
            SimpleNamespace(view=SimpleNamespace(name="swa"), own_slots=windows, ratio=1, by_row=None)
        )
    return BatchViews(SimpleNamespace(req_to_token_pool=SimpleNamespace(req_to_token=TABLE)), groups)


def batch(mode: str, requests: list[Request], **more: Any) -> Any:
    return SimpleNamespace(
        forward_mode=SimpleNamespace(name=mode, is_decode=lambda: mode == "DECODE"),
        batch_size=len(requests), rids=[request.rid for request in requests],
        req_pool_indices=torch.tensor([2, 3][: len(requests)]),
        **{name: torch.tensor([8, 9]) for name in ("input_ids", "positions", "out_cache_loc")}, **more,
    )  # fmt: skip


REQUESTS = [Request("a", [5, 6, 7], []), Request("b", [1, 2], [3, 4])]


def test_a_decode_continues_after_all_tokens_but_the_newest() -> None:
    given = batch("DECODE", REQUESTS, seq_lens=torch.tensor([3, 4]))
    view = views().build(given, REQUESTS)
    assert view.prefix_lens.tolist() == [2, 3]
    assert view.extend_lens.tolist() == [1, 1]
    assert view.token_starts.tolist() == [0, 1, 2]
    assert view.digests is not None
    assert view.digests.tolist() == [chain([5, 6]), chain([1, 2, 3])]
    assert view.request_ids == ["a", "b"]
    step = view.groups["full"]
    assert step.slot_table is TABLE
    assert step.out_slots is given.out_cache_loc
    assert view.input_ids is given.input_ids
    assert view.positions is given.positions


@pytest.mark.parametrize("mode", ["EXTEND", "MIXED"])
def test_an_extension_has_its_own_lengths(mode: str) -> None:
    given = batch(mode, REQUESTS, extend_prefix_lens=torch.tensor([1, 3], dtype=torch.int32),
                  extend_seq_lens=torch.tensor([2, 1], dtype=torch.int32))  # fmt: skip
    view = views().build(given, REQUESTS)
    assert view.prefix_lens.tolist() == [1, 3]
    assert view.extend_lens.tolist() == [2, 1]
    assert view.token_starts.tolist() == [0, 2, 3]
    assert view.known_lens is not None
    assert view.known_lens.tolist() == [3, 4]
    assert view.known_digests is not None
    assert view.known_digests.tolist() == [chain([5, 6, 7]), chain([1, 2, 3, 4])]


def test_a_verification_extends_by_all_that_was_drafted() -> None:
    given = batch("TARGET_VERIFY", REQUESTS, seq_lens=torch.tensor([2, 3]),
                  spec_info=SimpleNamespace(draft_token_num=4))  # fmt: skip
    view = views().build(given, REQUESTS)
    assert view.prefix_lens.tolist() == [2, 3]
    assert view.extend_lens.tolist() == [4, 4]
    assert view.token_starts.tolist() == [0, 4, 8]
    assert view.positions is given.positions
    assert view.known_lens is not None
    assert view.known_lens.tolist() == [3, 4], "the first of them is no draft"


def test_the_newest_view_is_kept_where_several_models_draft() -> None:
    """They are given the same inputs, which they rotate in place."""
    made, given = views(), batch("DECODE", REQUESTS, seq_lens=torch.tensor([3, 4]))
    made.build(given, REQUESTS)
    assert made.last is None
    made.keeps_last = True
    made.build(given, REQUESTS)
    given.input_ids.fill_(1)
    assert made.last is not None
    assert made.last.input_ids.tolist() == [8, 9]


@pytest.mark.parametrize("mode", ["DRAFT_EXTEND_V2", "PREBUILT", "SPLIT_PREFILL", "DLLM_EXTEND"])
def test_other_modes_are_refused_by_name(mode: str) -> None:
    with pytest.raises(UnsupportedEngine, match=f"forward mode {mode} is not covered yet"):
        views().build(batch(mode, REQUESTS), REQUESTS)


def test_a_forward_of_other_requests_is_no_view_of_these() -> None:
    given = batch("DECODE", REQUESTS, seq_lens=torch.tensor([3, 4]))
    with pytest.raises(LookupError, match=r"2 requests, \['a', 'b'\]; its scheduler handed out \['b', 'a'\]"):
        views().build(given, REQUESTS[::-1])
    given.req_pool_indices = torch.tensor([2, 3, 0])  # padded
    with pytest.raises(LookupError):
        views().build(given, REQUESTS)


def test_the_types_of_views_are_told_before_the_first() -> None:
    types = views().step_types
    given = batch("DECODE", REQUESTS, seq_lens=torch.tensor([3, 4]))
    view = views().build(given, REQUESTS)
    assert (types.slot_table, types.rows) == (TABLE.dtype, view.rows.dtype)
    assert {types.lengths} == {view.prefix_lens.dtype, view.extend_lens.dtype, view.token_starts.dtype}
    assert (types.input_ids, types.positions) == (view.input_ids.dtype, view.positions.dtype)
    assert types.has_digests
    assert types.has_known_tokens
    assert types.expected_ids is None


def test_a_window_group_is_shown_by_its_own_slots() -> None:
    """A slot that has none stays 0, which nobody has written; a token whose KV went there is not recorded."""
    own = torch.arange(41) * 2
    own[21] = own[9] = 0
    given = batch("DECODE", REQUESTS, seq_lens=torch.tensor([3, 4]))
    given.out_cache_loc = torch.tensor([22, 9])
    built = views(WindowSlots(own))
    view = built.build(given, REQUESTS)
    step = view.groups["swa"]
    assert step.slot_table[2, :4].tolist() == [40, 0, 44, 46]
    assert step.slot_table[3, :4].tolist() == [60, 62, 64, 66]
    assert step.out_slots.tolist() == [44, -1]
    assert view.groups["full"].out_slots.tolist() == [22, 9]
    own[21] = 5  # the same memory again for the next forward, with what the mapping has then
    assert built.build(given, REQUESTS).groups["swa"].slot_table is step.slot_table
    assert step.slot_table[2, 1] == 5
    assert step.slot_table.dtype == TABLE.dtype


def test_an_entry_that_leads_nowhere_is_shown_and_does_not_end_the_checks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    damaged = TABLE.clone()
    damaged[2, 1], damaged[3, 0] = torch.iinfo(TABLE.dtype).max, -7
    monkeypatch.setattr(sys.modules[__name__], "TABLE", damaged)
    own = torch.cat((torch.arange(41) * 2, torch.tensor([-1])))
    given = batch("DECODE", REQUESTS, seq_lens=torch.tensor([3, 4]))
    given.out_cache_loc = torch.tensor([22, 1 << 40])
    step = views(WindowSlots(own)).build(given, REQUESTS).groups["swa"]
    assert step.slot_table[2, :4].tolist() == [40, -1, 44, 46]
    assert step.slot_table[3, :4].tolist() == [-1, 62, 64, 66]
    assert step.out_slots.tolist() == [44, -1]


def test_slots_of_unified_memory() -> None:
    """The table has virtual slots, and `out_cache_loc` physical ones, of the full layers."""
    full, windows = (PhysicalSlots(Allocator({}, count=41)) for _ in range(2))
    for own, first in ((full, 1), (windows, 3)):
        own._allocator.virtual_to_physical[20:37] = torch.arange(first, first + 17)
    given = batch("DECODE", REQUESTS, seq_lens=torch.tensor([3, 4]))
    given.out_cache_loc, given.out_cache_loc_virtual = torch.tensor([3, 14]), torch.tensor([22, 33])
    windows._allocator.virtual_to_physical[33] = -1
    groups = [
        SimpleNamespace(view=SimpleNamespace(name=name), own_slots=own, ratio=1, by_row=None)
        for name, own in (("full", full), ("swa", windows))
    ]
    runner = SimpleNamespace(req_to_token_pool=SimpleNamespace(req_to_token=TABLE))
    view = BatchViews(runner, groups).build(given, REQUESTS)  # type: ignore[arg-type]
    step = view.groups["full"]
    assert step.slot_table[2, :4].tolist() == [1, 2, 3, 4]
    assert step.slot_table[3, :4].tolist() == [11, 12, 13, 14]
    assert step.out_slots.tolist() == [3, 14]
    assert view.groups["swa"].slot_table[3, :4].tolist() == [13, 14, 15, 0]
    assert view.groups["swa"].out_slots.tolist() == [5, -1]
