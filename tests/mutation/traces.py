"""Defects of the spans of incidents, sweeps and drills."""

from __future__ import annotations

from tests.mutation.mutant import mutants

_TRACING = "tests/telemetry/test_tracing.py::"
_OPENS = _TRACING + "test_an_incident_leaves_when_it_opens"
_CALLER = _TRACING + "test_a_sweep_is_a_child_of_its_caller"
_DRILLS = "tests/telemetry/test_drill_spans.py::"
_TIMES = _DRILLS + "test_times_are_those_of_the_drill_and_of_each_report"
_ROUTE = _DRILLS + "test_the_route_leads_to_spans_in_the_callers_trace"

ALL = (
    *mutants(
        "canary_obs/telemetry/incident_spans.py",
        ('            self._export(tracked, "kv_canary.incident", incident.last_ns)\n', "", _OPENS),
        ("        tracked.sent.add(event.number)\n", "", _OPENS),
        ("        for tracked in self._open.values():\n", "        for tracked in ():\n", _OPENS),
        ("self._sweep_of(row.sweep_id)", "None", _CALLER),
    ),
    *mutants(
        "canary_obs/telemetry/sweep_spans.py",
        ("    if caller is None:\n", "    if True:\n", _CALLER),
        ("        parent=caller,\n", "", _CALLER),
    ),
    *mutants(
        "canary_obs/telemetry/drill_spans.py",
        ("part.reported_ns or record.ended_ns", "record.ended_ns", _TIMES),
        ("        parent=caller,\n", "", _ROUTE),
        ("frozenset({DrillOutcome.MISSED, DrillOutcome.UNANSWERED})", "frozenset(DrillOutcome)", _TIMES),
        ("own.trace_id if caller is None else caller.trace_id", "own.trace_id", _ROUTE),
    ),
    *mutants(
        "canary_obs/hub/drills.py",
        (
            "        self._ended.append(record)\n",
            "        if not drill.result.cancelled():\n            self._ended.append(record)\n",
            _DRILLS + "test_a_drill_is_exported_even_if_its_caller_has_gone",
        ),
        ("deque(maxlen=RECORDS_KEPT)", "deque()", _DRILLS + "test_the_latest_drills_are_kept"),
    ),
    *mutants(
        "canary_obs/telemetry/spans.py",
        ("if name != HOST_NAME", "if name", _TRACING + "test_an_open_incident_is_exported_at_the_end"),
    ),
)
