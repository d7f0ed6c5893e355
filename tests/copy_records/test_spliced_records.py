"""Records that travel in memory of their own."""

from __future__ import annotations

import torch

from canary_kernels.layout import RECORD_WORDS
from canary_obs.copy_records.spliced_records import SplicedRecords

RECORDS = torch.arange(1, 1 + 3 * RECORD_WORDS).view(3, RECORD_WORDS)
SLOTS = torch.tensor([4, 9, 2])


def spliced() -> SplicedRecords:
    return SplicedRecords(12, 4, torch.device("cpu"))


def test_what_arrived_is_given_once() -> None:
    sender = spliced()
    sender.fill(SLOTS, RECORDS)
    records, known = sender.take(torch.tensor([2, 3, 4]))
    assert records.tolist() == [RECORDS[2].tolist(), [0] * RECORD_WORDS, RECORDS[0].tolist()]
    assert known.tolist() == [True, False, True]
    _, known = sender.take(torch.tensor([2, 4]))
    assert not known.any()


def test_slots_without_records_send_none() -> None:
    sender = spliced()
    sender.fill(SLOTS, RECORDS)
    sender.fill(SLOTS[:1], None)
    assert sender.take(SLOTS)[1].tolist() == [False, True, True]


def test_two_buffers_of_whole_pages_hold_them() -> None:
    for buffer in spliced().buffers:
        assert buffer.bytes == 12 * RECORD_WORDS // 2 * 8
        assert buffer.page_bytes == 4 * RECORD_WORDS // 2 * 8
        assert buffer.address
