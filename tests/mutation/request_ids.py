"""Seeded defects of request ids, which clients choose."""

from __future__ import annotations

from tests.mutation.mutant import mutants

_ROWS = "tests/runtime/device/test_violation_log.py::test_a_request_of_any_name_can_be_sent"
_EVIDENCE = "tests/runtime/evidence/test_collector.py::test_requests_of_any_name_can_be_sent"
_WIRE = "tests/transport/test_wire.py::test_the_largest_backlog_is_one_message_below_the_limit"

NAMES = mutants(
    "canary_obs/slot_facts.py",
    ('_REQUEST_LENGTH, _CUT = 256, "..."', '_REQUEST_LENGTH, _CUT = 512, "..."', _WIRE),
    ("len(request_id) <= _REQUEST_LENGTH", "len(request_id) < _REQUEST_LENGTH", _ROWS),
    ('name.encode(errors="replace").decode()', "name", _ROWS),
)

USES = (
    *mutants(
        "canary_obs/runtime/device/violation_log.py",
        ("else request_name(request),", "else request,", _ROWS),
    ),
    *mutants(
        "canary_obs/runtime/evidence/history.py",
        ("tuple(map(request_name, self._requests_at(step)))", "tuple(self._requests_at(step))", _EVIDENCE),
    ),
    *mutants(
        "canary_obs/runtime/evidence/collector.py",
        (
            "tuple(map(request_name, self._holders(group.name, reading.slot)))",
            "self._holders(group.name, reading.slot)",
            _EVIDENCE,
        ),
    ),
)

ALL = NAMES + USES
