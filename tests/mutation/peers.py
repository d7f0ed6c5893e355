"""Seeded defects of who may connect to the service, and of how much it holds of a connection."""

from __future__ import annotations

from tests.mutation.mutant import mutants

_USERS = "tests/transport/test_users.py::"
_BOUNDS = "tests/transport/test_memory_bounds.py::"
_PARTS = _BOUNDS + "test_a_message_of_several_parts_is_refused_and_costs_the_connection"

ADMISSION = mutants(
    "canary_obs/transport/admission.py",
    (
        "socket.setsockopt(zmq.IPC_FILTER_UID, user)",
        "pass",
        _USERS + "test_the_kernel_is_asked_for_own_user_and_root",
    ),
    (
        "sorted({0, os.geteuid()})",
        "sorted({os.geteuid()})",
        _USERS + "test_the_kernel_is_asked_for_own_user_and_root",
    ),
    (
        ' and event["value"] not in _SHORTAGES',
        "",
        _USERS + "test_only_a_refused_user_counts_as_one",
    ),
)

LISTENER = mutants(
    "canary_obs/transport/listener.py",
    ("connection.shutdown(socket.SHUT_RDWR)", "pass", _PARTS),
    ("if self._socket.getsockopt(zmq.RCVMORE):", "if False:", _PARTS),
    (
        "            self._socket.setsockopt(zmq.RCVHWM, RECEIVED_MESSAGES)\n",
        "",
        _BOUNDS + "test_a_connection_that_is_not_read_keeps_few_messages",
    ),
)

ALL = ADMISSION + LISTENER
