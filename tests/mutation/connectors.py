"""Defects of following what KV connectors load; killed by tests without an engine."""

from __future__ import annotations

from tests.mutation.mutant import mutants

_LOADS = "tests/engines/vllm/test_connector_loads.py::"

LOADS = mutants(
    "canary_obs/engines/vllm/connector_loads.py",
    (
        "first = 0 if computed is None else load.first",
        "first = load.first",
        _LOADS + "test_whole_blocks_are_awaited",
    ),
    (
        "stop = min(load.stop, computed - load.number * group.block_size)",
        "stop = load.stop",
        _LOADS + "test_what_the_forward_writes_gets_no_baseline",
    ),
    (
        "for request in self._waiting.keys() & computed.keys():",
        "for request in list(self._waiting):",
        _LOADS + "test_a_waiting_request_gets_no_baseline_before_it_is_scheduled",
    ),
    (
        "            self._waiting.pop(request, None)\n        computed",
        "            pass\n        computed",
        _LOADS + "test_a_request_that_ended_is_forgotten",
    ),
    (
        "if load.group == group.number:",
        "if load.group != group.number:",
        _LOADS + "test_other_groups_lose_what_a_load_overwrites",
    ),
    (
        "        self._landing = []  # of a step that failed: nobody knows what has arrived\n",
        "",
        _LOADS + "test_a_step_that_failed_reports_no_arrival",
    ),
    (
        "observer.invalidated(other.view.name, slots)",
        "pass",
        _LOADS + "test_other_groups_lose_what_a_load_overwrites",
    ),
)

ALL = LOADS
