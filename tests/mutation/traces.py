"""Defects of the spans of incidents, sweeps and drills, and of the metrics that are exported."""

from __future__ import annotations

from tests.mutation.mutant import mutants

_TRACING = "tests/telemetry/test_tracing.py::"
_OPENS = _TRACING + "test_an_incident_leaves_when_it_opens"
_CALLER = _TRACING + "test_a_sweep_is_a_child_of_its_caller"
_DRILLS = "tests/telemetry/test_drill_spans.py::"
_TIMES = _DRILLS + "test_times_are_those_of_the_drill_and_of_each_report"
_RESTART = "tests/telemetry/test_sweep_restart.py::"
_LATE = _RESTART + "test_a_rank_that_reports_after_the_others_is_not_lost"
_METRICS = "tests/telemetry/test_metric_export.py::"
_KINDS = _METRICS + "test_kinds_units_and_times_follow_the_specification"
_PAGE = _METRICS + "test_every_family_of_the_page_arrives_as_it_is_there"
_KEPT = "tests/engines/toolkit/test_trace_contexts.py::"
_OF_SGLANG = "tests/engines/sglang/test_request_traces.py::"
_TRACED = "tests/runtime/test_request_traces.py::"
_LINKS = "tests/telemetry/test_request_links.py::"
_ROUTE = _DRILLS + "test_the_route_leads_to_spans_in_the_callers_trace"

ALL = (
    *mutants(
        "canary_obs/telemetry/incident_spans.py",
        ('            self._export(tracked, "kv_canary.incident", incident.last_ns)\n', "", _OPENS),
        ("        tracked.sent.add(event.number)\n", "", _OPENS),
        ("        for tracked in self._open.values():\n", "        for tracked in ():\n", _OPENS),
        ("self._sweep_of(row.sweep_id)", "None", _CALLER),
        (
            "            tracked.linked.add(row.traceparent)\n",
            "",
            _LINKS + "test_an_incident_links_to_the_callers_of_its_requests_once_each",
        ),
    ),
    *mutants(
        "canary_obs/telemetry/sweep_spans.py",
        ("    if caller is None:\n", "    if True:\n", _CALLER),
        ("        parent=caller,\n", "", _CALLER),
    ),
    *mutants(
        "canary_obs/telemetry/metric_points.py",
        ('metric.name.removesuffix("_total")', "metric.name", _KINDS),
        ('"bytes": "By"', '"bytes": "bytes"', _KINDS),
        (
            "if points + len(series) > size:",
            "if False:",
            _METRICS + "test_a_large_fleet_is_sent_in_requests_that_a_receiver_takes",
        ),
        ("            count=sum(value.counts),\n", "            count=value.counts[-1],\n", _PAGE),
        (
            "family.exemplars.get(values)",
            "None",
            _METRICS + "test_a_violation_has_an_exemplar_that_leads_to_its_incident",
        ),
    ),
    *mutants(
        "canary_obs/telemetry/metric_export.py",
        (
            "POINTS_PER_REQUEST = 1024",
            "POINTS_PER_REQUEST = 2048",
            _METRICS + "test_a_request_with_the_longest_labels_fits_what_receivers_take_by_grpc",
        ),
        (
            "delivered and self._exporter",
            "self._exporter",
            _METRICS + "test_after_a_failed_request_the_rest_is_given_up",
        ),
        (
            "if name != SERVICE_INSTANCE_ID",
            "if name",
            _METRICS + "test_the_label_instance_is_left_to_the_engine",
        ),
        (
            "        self._thread.join(CLOSE_SECONDS)\n",
            "        self._thread.join()\n",
            _METRICS + "test_closing_does_not_wait_for_a_receiver_that_hangs",
        ),
    ),
    *mutants(
        "canary_obs/engines/toolkit/trace_contexts.py",
        (
            "_VERSION_0.fullmatch(given)",
            "given",
            _KEPT + "test_headers_without_a_usable_context_have_none",
        ),
        (
            "name = request_name(request)",
            "name = request",
            _KEPT + "test_a_context_is_kept_by_the_name_that_findings_have",
        ),
        (
            "        self._by_name.move_to_end(name)\n",
            "",
            _KEPT + "test_the_latest_requests_are_kept",
        ),
    ),
    *mutants(
        "canary_obs/engines/sglang/request_traces.py",
        (
            " or traced.root_span_context is None",
            "",
            _OF_SGLANG + "test_a_request_that_is_not_traced_has_none",
        ),
        (
            'not getattr(settings_of(scheduler), "enable_trace", False)',
            "False",
            _OF_SGLANG + "test_a_scheduler_that_traces_nothing_is_left_alone",
        ),
    ),
    *mutants(
        "canary_obs/runtime/delivery.py",
        (
            "self._reporter.send_violations(self._traced(findings))",
            "self._reporter.send_violations(findings)",
            _TRACED + "test_findings_have_the_context_that_the_adapter_knows",
        ),
        (
            "            self._faults.count_fault(ObserverPart.EVIDENCE, error)\n",
            "",
            _TRACED + "test_an_adapter_that_fails_costs_no_finding",
        ),
    ),
    *mutants(
        "canary_obs/telemetry/otlp.py",
        (
            "and has_endpoint and signal.by_endpoint",
            "and has_endpoint",
            _METRICS + "test_it_is_off_unless_asked_for",
        ),
    ),
    *mutants(
        "canary_obs/hub/sweeps.py",
        (
            "entry.reported_end() or self._wall_ns()",
            "self._wall_ns()",
            _RESTART + "test_a_sweep_that_ended_while_no_service_ran",
        ),
    ),
    *mutants(
        "canary_obs/hub/sweep_entry.py",
        ("self.ended_ns, *self._by_status().items()", "self.ended_ns", _LATE),
        (
            "self.progress is None or self.progress.status is SweepStatus.RUNNING",
            "self.progress is None",
            _RESTART + "test_a_sweep_that_fell_silent_ends_when_that_was_seen",
        ),
        (
            "requested_ns=progress.started_ns",
            "requested_ns=time.time_ns()",
            _RESTART + "test_a_sweep_that_ends_under_the_next_service",
        ),
    ),
    *mutants(
        "canary_obs/telemetry/tracing.py",
        ("len(record.ranks) > len(known)", "not known", _LATE),
    ),
    *mutants(
        "canary_obs/telemetry/drill_spans.py",
        ("part.reported_ns or record.ended_ns", "record.ended_ns", _TIMES),
        ("parent=caller_of(record.traceparent)", "parent=None", _ROUTE),
        ("frozenset({DrillOutcome.MISSED, DrillOutcome.UNANSWERED})", "frozenset(DrillOutcome)", _TIMES),
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
