"""What a dry run says of a fault is what `protect` does about the same fault."""

from __future__ import annotations

import pytest

from tests.engines.reference.heal.agreement import pair
from tests.engines.reference.heal_table import MODELS
from tests.sizes import sized

FAULTS = sized(12, 3)  # by model
FIRST = 100  # seed
# What a request computed from damage that was left in place can look like another damage (not a number).
LATER = {"compressed": sized(1, 0)}


@pytest.mark.parametrize("model", sized(MODELS, ["llama", "host_tier", "swa"]))
def test_a_dry_run_says_action_by_action_what_protect_does(model: str) -> None:
    acted, later = 0, []
    for seed in range(FIRST, FIRST + FAULTS):
        found = pair(model, seed)
        assert found.said == found.done, (seed, found.fault)
        assert found.done_later == [], (seed, found.fault)
        acted += bool(found.done)
        later += [(seed, found.fault, found.said_later)] if found.said_later else []
    print(f"{model}: {acted} faults acted upon, later {later}")
    assert acted >= FAULTS // 2
    assert len(later) <= LATER.get(model, 0), later


def test_a_dry_run_knows_what_is_cached_of_a_request_that_starts_again() -> None:
    found = pair("llama", 143)  # its first pages, which leave again
    assert found.said == found.done
    assert [action[1] for action in found.done] == ["recompute", "evict"]
