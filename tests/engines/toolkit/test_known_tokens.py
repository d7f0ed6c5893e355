"""What a scheduler said of its requests, in the order of the worker's batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from canary_kernels.forward_start import RING_ROWS, start_forward
from canary_kernels.layout import TICK_BITS
from canary_obs.engines.toolkit.known_tokens import KnownColumns, KnownTokens
from canary_obs.engines.toolkit.later import Later
from canary_obs.runtime.device.backend import choose_backend


def filled(known: KnownTokens, requests: list[str]) -> KnownColumns:
    known.begin(requests)
    known.fill()
    return known.columns(len(requests))


TOLD = np.array([[3, 4, 5], [30, 40, 50]])


def test_columns_are_in_the_order_of_the_batch() -> None:
    known = KnownTokens(4, torch.device("cpu"))
    known.note({"a": 1, "b": 2, "c": 1}, TOLD)
    lens, digests = filled(known, ["c", "a", "b"])
    assert (lens.tolist(), digests.tolist()) == ([5, 3, 4], [50, 30, 40])


def test_a_request_of_which_nothing_was_said_is_unknown() -> None:
    known = KnownTokens(4, torch.device("cpu"))
    known.note({"a": 1, "b": 2, "c": 1}, TOLD)
    assert filled(known, ["a", "x"]).lens.tolist() == [3, -1]
    known.note({"a": 1}, None)
    assert filled(known, ["a"]).lens.tolist() == [-1]
    assert filled(known, []).lens.tolist() == []


def test_the_same_number_of_requests_gets_the_same_tensors() -> None:
    """The checks keep what they make of a forward's tensors as long as these stay the same."""
    known = KnownTokens(4, torch.device("cpu"))
    known.note({"a": 1, "b": 2, "c": 1}, TOLD)
    first, other = filled(known, ["a", "b"]), filled(known, ["a"])
    assert first.lens is filled(known, ["c", "b"]).lens
    assert first.lens is not other.lens
    assert first.lens.tolist() == [5, 4]


def test_another_order_is_noticed() -> None:
    """Of the batch or of what is sent: where they are among each other is kept while both stay the same."""
    known = KnownTokens(4, torch.device("cpu"))
    for sent, batch in (("abc", "ca"), ("abc", "ac"), ("cab", "ac"), ("ab", "ac"), ("abc", "ac"), ("", "ac")):
        known.note(dict.fromkeys(sent, 1), np.array([[ord(name) for name in sent]] * 2, dtype=np.int64))
        wanted = [ord(name) if name in sent else -1 for name in batch]
        assert filled(known, list(batch)).lens.tolist() == wanted


def later(asked: list[int]) -> Later[Any]:
    return Later(lambda: asked.append(1) or TOLD)  # type: ignore[func-returns-value]


def test_what_is_computed_later_is_unknown_until_the_forward_was_launched() -> None:
    known, asked, clock = KnownTokens(4, torch.device("cpu")), list[int](), torch.zeros(1, dtype=torch.int64)
    launches, given = known.launches(), torch.tensor([7, 8], dtype=torch.int32)
    known.note({"a": 1, "b": 2, "c": 1}, later(asked))
    known.begin(["c", "a"], given)
    rest = launches.stage(3)
    backend, columns = choose_backend("auto", torch.device("cpu")), known.columns(2)
    start_forward(backend, clock, 3 << TICK_BITS, launches.host, 2)
    assert (columns.lens.tolist(), asked, known.rows[:2].tolist()) == ([-1, -1], [], [7, 8])
    given.zero_()  # the engine makes it anew
    assert rest is not None
    rest()
    start_forward(backend, clock, 0, launches.host, 2, rows=False)
    assert (columns.lens.tolist(), columns.digests.tolist(), asked) == ([5, 3], [50, 30], [1])
    assert known.rows[:2].tolist() == [7, 8]
    known.note({"a": 1}, TOLD[:, :1])
    known.begin(["a"])
    assert launches.stage(4) is None


def test_a_device_that_is_late_takes_rows_and_known_tokens() -> None:
    """Behind a long forward it begins this one after the host has launched all of it, and filled the rest."""
    known, clock = KnownTokens(4, torch.device("cpu")), torch.zeros(1, dtype=torch.int64)
    launches, backend = known.launches(), choose_backend("auto", torch.device("cpu"))
    known.note({"a": 1, "b": 2, "c": 1}, later([]))
    known.begin(["c", "a"], torch.tensor([7, 8], dtype=torch.int32))
    rest = launches.stage(3)
    assert rest is not None
    rest()
    start_forward(backend, clock, 3 << TICK_BITS, launches.host, 2)
    assert known.rows[:2].tolist() == [7, 8]
    start_forward(backend, clock, 0, launches.host, 2, rows=False)
    assert known.columns(2).lens.tolist() == [5, 3]
    assert known.rows[:2].tolist() == [7, 8]


def test_rows_that_are_needed_at_once_are_taken_with_columns_that_were_to_come_later() -> None:
    """Of V2 with drafts, whose checks precede the forward."""
    known = KnownTokens(4, torch.device("cpu"))
    for told, rows in ((later([]), [2, 0, 3]), (TOLD, [1, 2, 0]), (later([]), [3, 1, 2])):
        known.note({"a": 1, "b": 2, "c": 1}, told)
        known.begin(["a", "b", "c"], torch.tensor(rows))
        known.fill()
        assert known.rows[:3].tolist() == rows
        assert known.columns(3).lens.tolist() == [3, 4, 5]


def test_columns_that_are_needed_at_once_are_computed_at_once() -> None:
    known, asked = KnownTokens(4, torch.device("cpu")), list[int]()
    known.note({"a": 1, "b": 2, "c": 1}, later(asked))
    assert filled(known, ["b", "c"]).lens.tolist() == [4, 5]
    assert asked == [1]
    known.note({"a": 1}, Later(lambda: None))
    assert filled(known, ["a"]).lens.tolist() == [-1]


def test_a_row_of_the_ring_that_is_used_again_holds_another_batch() -> None:
    """Of more requests, or fewer, whose rows moved, moved back, or are none."""
    known, clock = KnownTokens(4, torch.device("cpu")), torch.zeros(1, dtype=torch.int64)
    launches, backend = known.launches(), choose_backend("auto", torch.device("cpu"))
    known.note({"a": 1, "b": 2, "c": 1}, TOLD)
    first, second = torch.tensor([7, 8]), torch.tensor([2, 3, 4], dtype=torch.int32)
    for step, (batch, rows) in enumerate((("ca", first), ("bac", second), ("c", None), ("ab", first))):
        known.rows.fill_(-5)
        known.begin(list(batch), rows)
        launches.stage(3 + RING_ROWS * step)
        start_forward(backend, clock, (RING_ROWS if step else 3) << TICK_BITS, launches.host, len(batch))
        assert known.rows[: len(batch)].tolist() == ([-5] if rows is None else rows.tolist())
        lens = dict(zip("abc", TOLD[0].tolist(), strict=True))
        assert known.columns(len(batch)).lens.tolist() == [lens[name] for name in batch]
