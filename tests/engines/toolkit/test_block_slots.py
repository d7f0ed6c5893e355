"""Slots of whole blocks, and the order in which their content is given up."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock, call

from canary_obs.engines.toolkit.block_slots import give_up, slots_of


def test_blocks_have_their_slots_in_order() -> None:
    assert slots_of([3, 0], 4).tolist() == [12, 13, 14, 15, 0, 1, 2, 3]
    assert slots_of([], 4).tolist() == []


def test_bytes_are_compared_before_their_records_are_emptied() -> None:
    observer: Any = Mock()
    slots = slots_of([2], 2)
    give_up(observer, "full", slots)
    assert observer.mock_calls == [call.before_load("full", slots), call.invalidated("full", slots)]
