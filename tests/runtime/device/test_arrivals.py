"""Violations of a comparison on arrival know whose bytes it was of."""

from __future__ import annotations

import pytest

from canary_kernels.layout import Phase, Reason
from canary_obs.runtime.device.arrivals import _KEPT, PEER_LENGTH, Arrivals, peer_name
from tests.runtime.device.test_violation_log import make, report


def test_the_clock_says_which_comparison_a_row_is_of() -> None:
    state, log = make()
    state.tick(7)
    state.arrivals.compared(state.now, "prefill-1")
    report(state, Phase.HEAD, Reason.KV_DATA, 3, 7, tick=1)
    report(state, Phase.HEAD, Reason.KV_DATA, 4, 7, tick=2)
    assert [row.peer for row in log.read(state.flat.clone(), 8)] == ["prefill-1", None]


def test_a_row_of_an_arrival_names_its_request_and_one_of_a_forward_the_forwards_own() -> None:
    state, log = make()
    log.remember_requests(7, ["decoding"])
    state.tick(7)
    state.arrivals.compared(state.now, "prefill-1", "arriving")
    report(state, Phase.HEAD, Reason.KV_DATA, 3, 7, tick=1)
    state.arrivals.compared(state.now + 1, "prefill-1")
    report(state, Phase.HEAD, Reason.KV_DATA, 4, 7, tick=2)
    report(state, Phase.HEAD, Reason.KV_DATA, 5, 7, tick=3, request=0)
    assert [row.request for row in log.read(state.flat.clone(), 8)] == ["arriving", None, "decoding"]


def test_a_row_says_whether_it_is_of_what_a_load_wrote_over() -> None:
    state, log = make()
    state.tick(7)
    state.arrivals.compared_before(state.now)
    report(state, Phase.HEAD, Reason.KV_DATA, 3, 7, tick=1)
    report(state, Phase.HEAD, Reason.KV_DATA, 4, 7, tick=2)
    rows = log.read(state.flat.clone(), 8)
    assert [log.is_before_load(row) for row in rows] == [True, False]
    assert [row.peer for row in rows] == [None, None]


def test_names_are_bounded_and_so_is_their_number() -> None:
    arrivals = Arrivals()
    for clock in range(_KEPT + 1):
        arrivals.compared(clock, "p")
        arrivals.compared_before(clock)
    assert arrivals.peer_of(0) is None
    assert [arrivals.is_before(clock) for clock in (0, 1)] == [False, True]
    assert arrivals.peer_of(_KEPT) == "p"


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("", "unknown"),
        ("10.0.0.7:5600", "10.0.0.7:5600"),
        ("a b\n{c}", "a_b__c_"),
        ("x" * 200, "x" * PEER_LENGTH),
    ],
)
def test_a_name_is_fit_for_a_label(given: str, shown: str) -> None:
    assert peer_name(given) == shown
