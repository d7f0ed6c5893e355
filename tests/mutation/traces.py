"""Defects of the spans of incidents and sweeps."""

from __future__ import annotations

from tests.mutation.mutant import mutants

_TRACING = "tests/telemetry/test_tracing.py::"
_OPENS = _TRACING + "test_an_incident_leaves_when_it_opens"
_CALLER = _TRACING + "test_a_sweep_is_a_child_of_its_caller"

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
        "canary_obs/telemetry/spans.py",
        ("if name != HOST_NAME", "if name", _TRACING + "test_an_open_incident_is_exported_at_the_end"),
    ),
)
