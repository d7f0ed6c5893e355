"""Whom damage has reached, in an engine's terms."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from canary_obs.engine_api.healing import Reached
from canary_obs.engines.toolkit.reached_damage import reached_damage
from canary_obs.vocabulary import Phase, Reason
from tests.runtime.taint.test_tracker import finding

GROUPS: Any = {
    "full": SimpleNamespace(number=1, block_slots=4),
    "draft": SimpleNamespace(number=1, block_slots=4),
    "swa": SimpleNamespace(number=0, block_slots=2),
}


def test_blocks_have_the_engines_numbers() -> None:
    filled = {"full": (8, 12), "draft": (8,), "swa": (6,)}
    reached = Reached(finding(0, 5, slot=7), True, (("a", 3),), filled)
    damage = reached_damage(reached, GROUPS, 9, "i")
    assert (damage.group, damage.block, damage.slot, damage.offset) == (1, 1, 7, 3)
    assert damage.filled == ((0, 3), (1, 2), (1, 3))
    assert (damage.readers, damage.overwritten, damage.found, damage.incident) == ((("a", 3),), True, 9, "i")


@pytest.mark.parametrize(("phase", "good"), [(Phase.TAIL, 8), (Phase.PATROL, None), (Phase.HEAD, None)])
def test_where_each_forward_compares_what_it_reads_the_one_before_is_known_to_be_good(
    phase: Phase, good: int | None
) -> None:
    reached = Reached(finding(0, 5, phase, Reason.KV_DATA), False, (), {})
    assert reached_damage(reached, GROUPS, 9, "i").good == good
