from __future__ import annotations

import pytest

from canary_obs.hub.drills import DrillInProgress, DrillStore
from canary_obs.vocabulary import DrillOutcome
from tests.service.fakes import drilled, identity

ME, OTHER = identity(0), identity(1)


def outcomes(record):
    return {drill.key[2]: drill.finding.outcome for drill in record.ranks}


def test_a_drill_finishes_with_its_last_report():
    drills = DrillStore(wall_ns=lambda: 5)
    drill_id, result = drills.start(60.0)
    drills.record_report(drilled(ME, drill_id))  # a rank in this process reports during the call
    assert not result.done()
    drills.set_expected_ranks(drill_id, [ME.key, OTHER.key])
    assert not result.done()
    drills.record_report(drilled(ME, "another"))
    drills.record_report(drilled(OTHER, drill_id))
    record = result.result(0)
    assert (record.id, record.requested_ns, record.ended_ns) == (drill_id, 5, 5)
    assert outcomes(record) == {0: DrillOutcome.DETECTED, 1: DrillOutcome.DETECTED}
    drills.record_report(drilled(OTHER, drill_id))
    assert drills.counts()[OTHER.key].outcomes == {DrillOutcome.DETECTED: 1}
    assert drills.counts()[OTHER.key].detected_ns == 5


def test_one_drill_at_a_time_until_its_deadline():
    drills = DrillStore()
    drill_id, result = drills.start(60.0)
    with pytest.raises(DrillInProgress):
        drills.start(60.0)
    drills.finish(drill_id)
    assert result.result(0).ranks == ()
    first, expired = drills.start(0.0)
    drills.set_expected_ranks(first, [ME.key])
    second, _ = drills.start(60.0)
    assert second != first
    assert outcomes(expired.result(0)) == {0: DrillOutcome.UNANSWERED}


def test_an_unanswered_drill_names_the_rank_and_is_counted():
    drills = DrillStore()
    drill_id, result = drills.start(60.0)
    drills.set_expected_ranks(drill_id, [ME.key, OTHER.key])
    drills.record_report(drilled(OTHER, drill_id))
    drills.finish(drill_id)
    drills.finish(drill_id)
    assert outcomes(result.result(0)) == {0: DrillOutcome.UNANSWERED, 1: DrillOutcome.DETECTED}
    assert drills.counts()[ME.key].outcomes == {DrillOutcome.UNANSWERED: 1}
    assert drills.counts()[ME.key].detected_ns is None


def test_a_drill_without_ranks_finishes_at_once():
    drills = DrillStore()
    drill_id, result = drills.start(60.0)
    drills.set_expected_ranks(drill_id, [])
    assert result.result(0).ranks == ()
