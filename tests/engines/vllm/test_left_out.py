"""What is said of groups that cannot be checked; with real ones: real/test_left_out.py."""

from __future__ import annotations

import pytest

from canary_obs.engines.vllm.left_out import LeftOut, check_something_is_left
from canary_obs.errors import UnsupportedEngine

STATES = LeftOut(number=1, layers=("a", "b"), bytes=25, reason="it holds states")


def test_the_share_and_the_reason_are_said() -> None:
    text = "KV cache group 1 is not checked (12.5% of KV bytes, 2 layers): it holds states"
    assert STATES.described(200) == text


def test_only_an_engine_of_which_nothing_is_left_is_refused() -> None:
    check_something_is_left(1, [STATES])
    check_something_is_left(0, [])
    with pytest.raises(UnsupportedEngine, match="can be checked: it holds states"):
        check_something_is_left(0, [STATES])
