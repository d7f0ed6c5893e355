"""Seeded defects that the tests of the documents find: code that is no more what a page says."""

from __future__ import annotations

from tests.mutation.mutant import mutants

_FACTS = "tests/docs/test_facts.py::test_"

ALL = (
    *mutants(
        "canary_obs/service/routes/events.py",
        ("STREAMS_MAX = 32", "STREAMS_MAX = 64", _FACTS + "every_figure_is_that_of_the_code"),
    ),
    *mutants(
        "canary_obs/config.py",
        (
            "verify_on_hit: bool = False",
            "verify_on_hit: bool = True",
            "tests/docs/test_checks.py::test_what_is_on_by_default",
        ),
        (
            "sweep_timeout_seconds: Seconds = 120.0",
            "sweep_timeout_seconds: Seconds = 60.0",
            _FACTS + "every_default_is_that_of_the_code",
        ),
    ),
    *mutants(
        "canary_obs/telemetry/readings.py",
        (
            "one(ended / 1e9 if ended else None)",
            "one(ended / 1e9 if ended else 0.0)",
            "tests/docs/test_snippets.py::test_what_was_not_measured_is_absent_and_what_can_happen_is_0",
        ),
    ),
    *mutants(
        "canary_obs/engines/vllm/runner_v2.py",
        (
            "has_known_tokens=True",
            "has_known_tokens=False",
            "tests/docs/test_checks.py::test_the_token_sources_are_those_of_the_adapters",
        ),
    ),
    *mutants(
        "canary_obs/telemetry/prometheus.py",
        (
            '"incident_id": exemplar.incident',
            '"incident": exemplar.incident',
            _FACTS + "exemplars_are_in_open_metrics_only_and_lead_where_the_page_says",
        ),
    ),
)
