from __future__ import annotations

import pytest

from canary_obs.hub.drills import DrillInProgress, DrillStore
from canary_obs.vocabulary import DrillOutcome
from tests.service.fakes import drilled, identity

ME, YOU = identity(0), identity(1)


def outcomes(record):
    return {drill.key[2]: drill.finding.outcome for drill in record.ranks}


def test_a_drill_finishes_with_its_last_report():
    book = DrillStore(lambda: 5)
    name, end = book.begin(60.0)
    book.record_report(drilled(ME, name))  # ahead of expect: a rank in this process answers inside the call
    assert not end.done()
    book.set_expected_ranks(name, [ME.key, YOU.key])
    assert not end.done()
    book.record_report(drilled(ME, "another"))
    book.record_report(drilled(YOU, name))
    record = end.result(0)
    assert (record.id, record.requested_ns, record.ended_ns) == (name, 5, 5)
    assert outcomes(record) == {0: DrillOutcome.DETECTED, 1: DrillOutcome.DETECTED}
    book.record_report(drilled(YOU, name))
    assert book.counts()[YOU.key].outcomes == {DrillOutcome.DETECTED: 1}
    assert book.counts()[YOU.key].detected_ns == 5


def test_one_drill_at_a_time_until_its_deadline():
    book = DrillStore()
    name, end = book.begin(60.0)
    with pytest.raises(DrillInProgress):
        book.begin(60.0)
    book.end(name)
    assert end.result(0).ranks == ()
    first, forgotten = book.begin(0.0)
    book.set_expected_ranks(first, [ME.key])
    second, _ = book.begin(60.0)
    assert second != first
    assert outcomes(forgotten.result(0)) == {0: DrillOutcome.UNANSWERED}


def test_a_rank_that_is_silent_is_named_and_counted():
    book = DrillStore()
    name, end = book.begin(60.0)
    book.set_expected_ranks(name, [ME.key, YOU.key])
    book.record_report(drilled(YOU, name))
    book.end(name)
    book.end(name)
    assert outcomes(end.result(0)) == {0: DrillOutcome.UNANSWERED, 1: DrillOutcome.DETECTED}
    assert book.counts()[ME.key].outcomes == {DrillOutcome.UNANSWERED: 1}
    assert book.counts()[ME.key].detected_ns is None


def test_nobody_to_ask_ends_at_once():
    book = DrillStore()
    name, end = book.begin(60.0)
    book.set_expected_ranks(name, [])
    assert end.result(0).ranks == ()
