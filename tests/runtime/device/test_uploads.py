"""Copies of lists on the device; on a GPU: tests/gpu."""

import torch

from canary_obs.runtime.device.uploads import uploaded_lists


def test_lists_are_sent_together():
    lists = [[3, 1], [], [2], [5, 5, -1]]
    parts = uploaded_lists(lists, torch.device("cpu"))
    assert [part.tolist() for part in parts] == lists
    assert {part.dtype for part in parts} == {torch.int64}
    assert len({part.untyped_storage().data_ptr() for part in parts}) == 1
    assert all(part.is_contiguous() for part in parts)
