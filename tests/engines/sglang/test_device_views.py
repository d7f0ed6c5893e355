"""Views of copies: equal to what SGLang had at the launch, whatever it writes afterwards."""

from __future__ import annotations

import copy
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from canary_obs.engines.sglang.batch_views import BatchViews
from canary_obs.engines.sglang.device_views import DeviceViews
from canary_obs.engines.sglang.window_slots import WindowSlots
from canary_obs.errors import UnsupportedEngine
from tests.engines.sglang.test_batch_views import REQUESTS, batch
from tests.engines.sglang.test_request_chains import Request, chain


def makers(
    table: torch.Tensor, windows: torch.Tensor | None = None, *, drafts: bool = False
) -> tuple[BatchViews, DeviceViews]:
    """`windows`: SGLang's mapping of slots."""
    groups: list[Any] = [
        SimpleNamespace(view=SimpleNamespace(name=name), own_slots=own, ratio=1, by_row=None)
        for name, own in {"full": None, "swa": None if windows is None else WindowSlots(windows)}.items()
        if name == "full" or own is not None
    ]
    runner = SimpleNamespace(req_to_token_pool=SimpleNamespace(req_to_token=table))
    return BatchViews(runner, groups), DeviceViews(runner, groups, drafts=4 * drafts)


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
    ends = (view.prefix_lens + view.extend_lens).tolist()
    slots = [
        [row[:end].tolist() for row, end in zip(step.slot_table[view.rows], ends, strict=True)]
        for step in view.groups.values()
    ]
    rest = (
        view.prefix_lens, view.extend_lens, view.token_starts, view.input_ids, view.positions, view.digests,
        view.known_lens, view.known_digests, *[step.out_slots for step in view.groups.values()],
    )  # fmt: skip
    return [slots, view.request_ids, *[column.tolist() for column in rest]]


def a_mapping(slots: int) -> torch.Tensor:
    """Every third slot has left the window; the last place stands for what is no slot."""
    found = torch.arange(3, slots + 4)
    found[1::3], found[-1] = 0, -1
    return found


@pytest.mark.parametrize("windows", [None, a_mapping(40)], ids=["full", "windows"])
@pytest.mark.parametrize("given", [a_decode(), an_extension("EXTEND"), an_extension("MIXED")])
def test_what_sglang_writes_for_the_next_batch_does_not_change_this_ones_view(
    given: Any, windows: torch.Tensor | None
) -> None:
    table, given = torch.arange(40, dtype=torch.int32).view(4, 10).clone(), copy.deepcopy(given)
    windows = None if windows is None else windows.clone()
    plain, own = makers(table, windows)
    expected = columns(plain.build(given, REQUESTS))
    view = own.build(given, REQUESTS)
    table.zero_()
    if windows is not None:
        assert expected[-1] == [11, 12, -1][: len(expected[-1])]
        windows.zero_()
    for name in ("seq_lens", "extend_prefix_lens", "extend_seq_lens"):
        if hasattr(given, name):
            getattr(given, name).add_(1)
    assert columns(view) == expected


@pytest.mark.parametrize("windows", [None, a_mapping(40)], ids=["full", "windows"])
@pytest.mark.parametrize("mode", ["EXTEND", "MIXED"])
def test_what_a_prompt_shows_may_follow_its_launch(mode: str, windows: torch.Tensor | None) -> None:
    """Of what the batch was then: SGLang pads it, with other tensors, as it launches the forward."""
    table, given = torch.arange(40, dtype=torch.int32).view(4, 10).clone(), an_extension(mode)
    plain, own = makers(table, windows)
    expected = columns(plain.build(given, REQUESTS))
    own.build(a_decode(), REQUESTS)  # whose values are there instead
    view = own.build(given, REQUESTS, late=True)
    before = columns(view)
    # The tokens, and where they are written, do not wait: that is compared before the launch.
    assert before[5:7] + before[10:] == expected[5:7] + expected[10:]
    assert before != expected
    for name in ("req_pool_indices", "extend_prefix_lens", "extend_seq_lens"):
        setattr(given, name, torch.zeros(4, dtype=torch.int32))
    own.keep_late()
    assert columns(view) == expected
    own.keep_late()
    assert columns(view) == expected


def test_a_prompt_whose_forward_failed_leaves_nothing_for_the_next_one() -> None:
    """Its values were never kept: the next decode is shown as without it."""
    table = torch.arange(80, dtype=torch.int32).view(2, 40).clone()
    plain, own = makers(table)
    request = Request("1", [5, 6, 7], [8])
    own.build(of_requests([request], table, late=False, extends=True), [request], late=True)
    for number in range(3):
        request.output_ids.append(9 + number)
        given = of_requests([request], table, late=False, extends=False)
        view = own.build(given, [request])
        own.keep_late()  # nothing is left
        assert columns(view) == columns(plain.build(given, [request]))


def test_tokens_of_a_prompt_that_the_scheduler_lacks_are_missed_after_its_launch() -> None:
    table = torch.arange(80, dtype=torch.int32).view(2, 40).clone()
    _, own = makers(table)
    request = Request("1", [5, 6, 7], [])
    given = of_requests([request], table, late=False, extends=True)
    given.extend_prefix_lens_cpu = [9]
    own.build(given, [request], late=True)
    with pytest.raises(LookupError, match="of which the scheduler has 3"):
        own.keep_late()
    own.keep_late()


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


@pytest.mark.parametrize("windows", [None, a_mapping(40)], ids=["full", "windows"])
def test_no_decode_is_compared_early_where_slots_leave_a_window(windows: torch.Tensor | None) -> None:
    """They are free then, and the next step may write to them, while the one before still runs."""
    _, own = makers(torch.arange(40, dtype=torch.int32).view(4, 10), windows)
    own.build(a_decode(), REQUESTS)
    assert own.repeats(a_decode(), REQUESTS) == (windows is None)


def test_some_decodes_are_shown_without_their_states() -> None:
    """A view of either kind is the same each time, so that it may be replayed."""
    table, rows = torch.arange(40, dtype=torch.int32).view(4, 10), torch.arange(4, dtype=torch.int32)
    groups: list[Any] = [
        SimpleNamespace(view=SimpleNamespace(name=name), own_slots=None, ratio=1, by_row=by_row)
        for name, by_row in {"full": None, "state": rows}.items()
    ]
    pool = SimpleNamespace(req_to_token=table, enable_mamba_extra_buffer=False)
    views = DeviceViews(SimpleNamespace(req_to_token_pool=pool), groups)
    requests = [copy.copy(request) for request in REQUESTS]
    for slot, request in enumerate(requests):
        vars(request).update(kv=SimpleNamespace(mamba_pool_idx=torch.tensor(slot)))
    assert views.states is not None
    views.states.every = 3
    shown = [views.build(a_decode(), requests) for _ in range(7)]
    assert [list(view.groups) for view in shown] == [["full", "state"], ["full"], ["full"]] * 2 + [
        ["full", "state"]
    ]
    assert len({id(view) for view in shown}) == 2
    assert not views.repeats(a_decode(), requests)
    assert list(views.build(an_extension("EXTEND"), requests).groups) == ["full", "state"]
    assert views.state_forwards(100) == 100  # counted from here on
    assert views.state_forwards(107) == 107 - views.states.left_out


def test_other_modes_and_other_requests_are_not_shown() -> None:
    _, own = makers(torch.arange(40, dtype=torch.int32).view(4, 10))
    with pytest.raises(UnsupportedEngine, match="SPLIT_PREFILL is not covered"):
        own.build(batch("SPLIT_PREFILL", REQUESTS), REQUESTS)
    with pytest.raises(LookupError, match="its scheduler handed out"):
        own.build(a_decode(), REQUESTS[:1])


@pytest.mark.parametrize("windows", [None, a_mapping(40)], ids=["full", "windows"])
def test_drafts_are_shown_of_copies(windows: torch.Tensor | None) -> None:
    """Of two requests the scheduler knows 3 and 4 tokens; the device has accepted one more of the second."""
    table = torch.arange(40, dtype=torch.int32).view(4, 10).clone()
    windows_before = torch.empty(0) if windows is None else windows.clone()
    _, own = makers(table, windows, drafts=True)
    assert not own.step_types.has_digests
    for width in (2, 3, 1):
        given = verified(width)
        view = own.build(given, REQUESTS, late=False)
        table_before = table.clone()
        tokens, slots = given.input_ids.tolist(), given.out_cache_loc.tolist()
        table.zero_()
        for tensor in (given.input_ids, given.positions, given.out_cache_loc, given.seq_lens):
            tensor.zero_()
        assert view.digests is None
        assert view.prefix_lens.tolist() == [2, 4]
        assert view.extend_lens.tolist() == [width, width]
        assert view.token_starts.tolist() == [0, width, 2 * width]
        assert view.input_ids.tolist() == tokens
        assert view.positions.tolist() == [*range(2, 2 + width), *range(4, 4 + width)]
        assert view.known_lens is not None
        assert view.known_digests is not None
        assert view.known_lens.tolist() == [3, 4]
        assert view.known_digests.tolist() == [chain(request.tokens) for request in REQUESTS]
        for name, step in view.groups.items():
            rows = step.slot_table[view.rows]
            expected = [table_before[row, : end + width] for row, end in ((2, 2), (3, 4))]
            mapped = (lambda of: of) if name == "full" else lambda of: windows_before[of]
            for row, slots_of in zip(rows, expected, strict=True):
                assert row[: slots_of.numel()].tolist() == mapped(slots_of.long()).tolist()
            written = torch.tensor(slots)
            if name == "swa":
                written = torch.where((found := windows_before[written]) > 0, found, -1)
            assert step.out_slots.tolist() == written.tolist()
        table.copy_(table_before)
        assert own.build(verified(width), REQUESTS) is view


def test_a_decode_after_drafts_starts_from_what_the_host_gives() -> None:
    table = torch.arange(40, dtype=torch.int32).view(4, 10)
    plain, own = makers(table, drafts=True)
    own.build(a_decode(), REQUESTS)
    own.build(verified(2), REQUESTS)
    assert not own.repeats(a_decode(), REQUESTS)
    expected, found = (maker.build(a_decode(), REQUESTS) for maker in (plain, own))
    assert found.known_digests is not None
    assert found.known_digests.tolist() == expected.known_digests.tolist()  # type: ignore[union-attr]


def verified(width: int) -> Any:
    """A batch that verifies so many tokens of each request."""
    for request in REQUESTS:
        request.kv = SimpleNamespace(kv_allocated_len=9)  # type: ignore[attr-defined]
    found = batch("TARGET_VERIFY", REQUESTS, seq_lens=torch.tensor([2, 4]))
    found.spec_info = SimpleNamespace(draft_token_num=width)
    found.positions = torch.tensor([*range(2, 2 + width), *range(4, 4 + width)])
    found.input_ids = torch.arange(50, 50 + 2 * width, dtype=torch.int32)
    found.out_cache_loc = torch.tensor([*range(22, 22 + width), *range(34, 34 + width)])
    return found


def of_requests(requests: list[Request], table: torch.Tensor, *, late: bool, extends: bool) -> Any:
    """A batch that is fed the newest token of each request, or all of it; late: and one that is not known."""
    lens = [len(request.tokens) + late for request in requests]
    before = [0 if extends else length - 1 for length in lens]
    rows = [request.rid for request in requests]
    given = batch(
        "EXTEND" if extends else "DECODE", requests, seq_lens=torch.tensor(lens),
        seq_lens_cpu=torch.tensor(lens), extend_prefix_lens_cpu=before, extend_seq_lens_cpu=lens,
        extend_prefix_lens=torch.tensor(before), extend_seq_lens=torch.tensor(lens),
    )  # fmt: skip
    given.req_pool_indices = torch.tensor([int(row) for row in rows])
    spans = [range(first, end) for first, end in zip(before, lens, strict=True)]
    given.positions = torch.tensor([place for span in spans for place in span])
    given.input_ids = given.positions * 3
    given.out_cache_loc = torch.cat(
        [table[int(row), span.start : span.stop] for row, span in zip(rows, spans, strict=True)]
    ).long()
    return given


@pytest.mark.parametrize("windows", [None, a_mapping(8 * 400)], ids=["full", "windows"])
@pytest.mark.parametrize("late", [False, True], ids=["known", "late"])
def test_batches_in_any_order_are_shown_as_without_copies(late: bool, windows: torch.Tensor | None) -> None:
    """Decodes that repeat for long, requests that come, go and change places, and prefills between."""
    draw = random.Random(11)
    table = torch.arange(8 * 400, dtype=torch.int32).view(8, 400).clone()
    plain, own = makers(table, windows)
    waiting = [Request(str(row), [draw.randrange(900) for _ in range(9)], []) for row in range(8)]
    running, repeated = waiting[:2], 0
    for _ in range(300):
        extends = draw.random() < 0.05
        if draw.random() < 0.1:
            running = draw.sample(waiting, draw.randrange(1, 6))
        for request in running:
            request.output_ids.append(draw.randrange(900))
        given = of_requests(running, table, late=late and not extends, extends=extends)
        shown = own._decoding
        view = own.build(given, list(running))
        repeated += view is shown
        assert columns(view) == columns(plain.build(given, list(running)))
    assert repeated > 150


def test_a_forward_that_could_not_be_shown_is_followed_by_whole_columns() -> None:
    """What it left on the device is not what is known of its requests."""
    table = torch.arange(80, dtype=torch.int32).view(2, 40).clone()
    plain, own = makers(table)
    request = Request("1", [5, 6, 7], [8])
    for number in range(6):
        request.output_ids.append(9 + number)
        given = of_requests([request], table, late=False, extends=False)
        if number == 3:  # the chains have advanced by then
            slots, given.out_cache_loc = given.out_cache_loc, None
            with pytest.raises(AttributeError):
                own.build(given, [request])
            given.out_cache_loc = slots
            plain.build(given, [request])
        else:
            assert columns(own.build(given, [request])) == columns(plain.build(given, [request]))
