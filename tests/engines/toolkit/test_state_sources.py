"""The bytes of states as sources."""

from __future__ import annotations

import pytest
import torch

from canary_obs.engines.toolkit.state_sources import state_sources
from canary_obs.errors import UnsupportedEngine


def test_every_byte_of_a_state_has_a_source() -> None:
    storage = torch.zeros(4, 64, dtype=torch.float32)
    conv, recurrence = storage[:, :12].unflatten(1, (3, 4)), storage[:, 12:44].unflatten(1, (2, 4, 4))
    found = state_sources([(7, (conv, recurrence))], 1)
    assert [(source.part.name, source.layer, source.slot_bytes, source.head_start) for source in found] == [
        ("K", 7, 48, 1), ("V", 7, 128, 1)
    ]  # fmt: skip
    assert {source.page_stride for source in found} == {256}
    with pytest.raises(UnsupportedEngine, match="keeps 3 tensors"):
        state_sources([(7, (conv, conv, conv))], 0)
    with pytest.raises(UnsupportedEngine, match="a multiple of 4"):
        state_sources([(7, (torch.zeros(4, 3, dtype=torch.int8),))], 0)
    with pytest.raises(UnsupportedEngine, match="one run of bytes"):
        state_sources([(7, (torch.zeros(4, 6, 8)[:, :, ::2],))], 0)
