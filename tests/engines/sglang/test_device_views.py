"""Views of copies: equal to what SGLang had at the launch, whatever it writes afterwards."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from canary_obs.engines.sglang.batch_views import BatchViews
from canary_obs.engines.sglang.device_views import DeviceViews
from canary_obs.errors import UnsupportedEngine
from tests.engines.sglang.test_batch_views import REQUESTS, batch
from tests.engines.sglang.test_request_chains import Request


def makers(table: torch.Tensor) -> tuple[BatchViews, DeviceViews]:
    groups: list[Any] = [SimpleNamespace(view=SimpleNamespace(name="full"), own_slots=None, ratio=1)]
    runner = SimpleNamespace(req_to_token_pool=SimpleNamespace(req_to_token=table))
    return BatchViews(runner, groups), DeviceViews(runner, groups)


def a_decode() -> Any:
    return batch("DECODE", REQUESTS, seq_lens=torch.tensor([3, 4]), seq_lens_cpu=torch.tensor([3, 4]))


def an_extension(mode: str) -> Any:
    found = batch(
        mode, REQUESTS, extend_prefix_lens=torch.tensor([1, 3], dtype=torch.int32),
        extend_seq_lens=torch.tensor([2, 1], dtype=torch.int32), extend_prefix_lens_cpu=[1, 3],
        extend_seq_lens_cpu=[2, 1],
    )  # fmt: skip
    found.input_ids = found.positions = found.out_cache_loc = torch.tensor([8, 9, 7])
    return found


def columns(view: Any) -> list[Any]:
    """What the checks read, request by request: rows have numbers of their own."""
    table = view.groups["full"].slot_table[view.rows]
    ends = (view.prefix_lens + view.extend_lens).tolist()
    slots = [row[:end].tolist() for row, end in zip(table, ends, strict=True)]
    rest = (
        view.prefix_lens, view.extend_lens, view.token_starts, view.input_ids, view.positions, view.digests,
        view.known_lens, view.known_digests, view.groups["full"].out_slots,
    )  # fmt: skip
    return [slots, view.request_ids, *[column.tolist() for column in rest]]


@pytest.mark.parametrize("given", [a_decode(), an_extension("EXTEND"), an_extension("MIXED")])
def test_what_sglang_writes_for_the_next_batch_does_not_change_this_ones_view(given: Any) -> None:
    table = torch.arange(40, dtype=torch.int32).view(4, 10).clone()
    plain, own = makers(table)
    expected = columns(plain.build(given, REQUESTS))
    view = own.build(given, REQUESTS)
    table.zero_()
    for name in ("seq_lens", "extend_prefix_lens", "extend_seq_lens"):
        if hasattr(given, name):
            getattr(given, name).add_(1)
    assert columns(view) == expected


def test_each_decode_shows_the_same_tensors() -> None:
    """The checks are prepared once for them."""
    _, own = makers(torch.arange(40, dtype=torch.int32).view(4, 10))
    first, second = (own.build(a_decode(), REQUESTS) for _ in range(2))
    for name in ("rows", "prefix_lens", "extend_lens", "token_starts", "input_ids", "positions", "digests"):
        assert getattr(first, name) is getattr(second, name)
    assert first.groups["full"].slot_table is second.groups["full"].slot_table
    assert first.groups["full"].out_slots is second.groups["full"].out_slots


def test_a_batch_that_repeats_is_shown_as_the_same_view() -> None:
    """And one of other requests, or after a prefill, as another."""
    _, own = makers(torch.arange(40, dtype=torch.int32).view(4, 10))
    first = own.build(a_decode(), REQUESTS)
    assert own.build(a_decode(), REQUESTS) is first
    others = [Request(one.rid + "x", one.tokens, []) for one in REQUESTS]
    given = a_decode()
    given.rids = [request.rid for request in others]
    other = own.build(given, others)
    assert list(other.request_ids) == given.rids
    assert list(own.build(a_decode(), REQUESTS).request_ids) == [request.rid for request in REQUESTS]
    own.build(an_extension("EXTEND"), REQUESTS)
    assert own.build(a_decode(), REQUESTS) is not first


def test_other_modes_and_other_requests_are_not_shown() -> None:
    _, own = makers(torch.arange(40, dtype=torch.int32).view(4, 10))
    with pytest.raises(UnsupportedEngine, match="TARGET_VERIFY is not covered"):
        own.build(batch("TARGET_VERIFY", REQUESTS), REQUESTS)
    with pytest.raises(LookupError, match="its scheduler handed out"):
        own.build(a_decode(), REQUESTS[:1])
