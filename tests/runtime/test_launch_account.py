"""What is added up for forwards that show the same is what each of them would have added."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given, strategies as st

from canary_kernels import layout
from canary_obs.runtime.device.owed_slots import OwedSlots
from canary_obs.runtime.launch_account import LaunchAccount

GROUPS = "full", "window"
# Of a view: group, new slots, slots of which a layer is compared; and the groups whose tokens are known.
VIEWS: list[Any] = [
    SimpleNamespace(owed=((0, 3, 1), (1, 3, 0)), compared=(0, 1)),
    SimpleNamespace(owed=((0, 8, 2),), compared=()),
    SimpleNamespace(owed=(), compared=()),
]
FORWARD = st.tuples(st.integers(0, 2), st.booleans(), st.booleans(), st.integers(0, 5), st.booleans())


@given(st.lists(FORWARD, max_size=30))
def test_sums_are_those_of_each_forward(forwards: list[tuple[int, bool, bool, int, bool]]) -> None:
    summed, single = OwedSlots(GROUPS), OwedSlots(GROUPS)
    account, copies = LaunchAccount(summed), 0
    for number, reuse, ends, requests, copied in forwards:
        view = VIEWS[number]
        if view is not account.shown:
            account.begin(view)
        account.compared += reuse
        account.completed += ends  # not of one that failed
        account.requests += requests if ends else 0
        for group, slots, of_layer in view.owed:
            if reuse:
                single.compared(group, layout.Phase.HEAD, slots)
            if ends:
                single.fingerprinted(group, slots)
                single.layer_checked(group, of_layer)
        for group in view.compared if ends else ():
            single.tokens_compared(group, requests)
        if copied:
            for owed in (summed, single):
                owed.expect(copies)
            assert summed._expected[copies] == single._expected[copies]
            copies += 1
    account.settle()
    assert summed._given == single._given


def test_nothing_is_added_twice() -> None:
    owed = OwedSlots(GROUPS)
    account = LaunchAccount(owed)
    account.settle()
    account.begin(VIEWS[0])
    account.compared, account.requests = 1, 2
    owed.expect(0)
    owed.expect(1)
    assert owed._expected[0] == owed._expected[1]
    assert owed._given[0][layout.Phase.HEAD] == 3
