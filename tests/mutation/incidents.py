"""Defects of the names of incidents, in the engine's log and in the service."""

from __future__ import annotations

from tests.mutation.mutant import mutants

_NAMER = "tests/runtime/report/test_incident_namer.py::"
_STORE = "tests/hub/test_incident_names.py::"
_PAGE = "tests/telemetry/test_prometheus.py::"
_FINDINGS = "tests/runtime/test_findings.py::"

ALL = (
    *mutants(
        "canary_obs/runtime/report/incident_namer.py",
        (
            "if now - self._latest <= QUIET_SECONDS:",
            "if True:",
            _NAMER + "test_what_is_met_again_later_does_not_bring_a_name_back",
        ),
        (
            "if now - self._latest > QUIET_SECONDS:",
            "if not self._names:",
            _NAMER + "test_findings_that_follow_each_other_have_one_name",
        ),
    ),
    *mutants(
        "canary_obs/runtime/report/reporter.py",
        (
            "        self.incidents.acknowledged()\n",
            "",
            _FINDINGS + "test_the_log_and_the_message_name_the_same_incident",
        ),
    ),
    *mutants(
        "canary_obs/runtime/delivery.py",
        (
            "            incidents.seen_again()\n",
            "            pass\n",
            _FINDINGS + "test_damage_that_is_met_again_keeps_the_incident",
        ),
    ),
    *mutants(
        "canary_obs/hub/incident_store.py",
        (
            "dict.fromkeys(names[-NAMES_KEPT:])",
            "names[-NAMES_KEPT:]",
            _STORE + "test_names_are_forgotten_with_their_incident",
        ),
        ("is_name(name) and ", "", _STORE + "test_a_name_of_another_form_is_not_used"),
        (
            "or (before.engine, before.instance) != key",
            "",
            _STORE + "test_the_name_of_another_engines_incident_is_not_used",
        ),
        (
            "            for name in evicted.other_names:\n                del self._by_other_name[name]\n",
            "",
            _STORE + "test_names_are_forgotten_with_their_incident",
        ),
        (
            "free[: OTHER_NAMES_KEPT - len(incident.other_names)]",
            "free",
            _STORE + "test_the_number_of_names_is_limited",
        ),
        (
            "                    if rank not in incident.acknowledged_ranks\n",
            "",
            _PAGE + "test_violation_counters_point_to_the_incident_until_it_is_acknowledged",
        ),
    ),
    *mutants(
        "canary_obs/hub/incidents.py",
        (
            "self.first_of.setdefault(rank, event)",
            "self.first_of[rank] = event",
            _PAGE + "test_an_incident_is_one_series_per_rank_with_that_ranks_first_violation",
        ),
    ),
)
