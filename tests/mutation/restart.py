"""Defects of the service's end, wait and restart."""

from __future__ import annotations

from tests.mutation.mutant import mutants

_PROCESS = "tests/engines/toolkit/test_service_process.py::"
_SERVE = "tests/service/test_serve.py::"

_NUMBER = "tests/engines/toolkit/test_server_number.py::"

ALL = (
    *mutants(
        "canary_obs/engines/toolkit/server_number.py",
        (
            "self._join(names[number], server):",
            "False:",
            _NUMBER + "test_processes_of_one_server_share_a_number_and_another_has_the_next",
        ),
        (
            "                fcntl.flock(file, fcntl.LOCK_SH)  # nobody",
            "                pass  # nobody",
            _NUMBER + "test_processes_of_one_server_share_a_number_and_another_has_the_next",
        ),
        (
            'f"server-{number}{part}.lock"',
            'f"server-{number}.lock"',
            _NUMBER + "test_parts_of_one_instance_are_numbered_by_themselves",
        ),
        ("if number == 1:", "if number == 0:", _NUMBER + "test_the_first_server_keeps_the_defaults"),
        (
            "if _port_is_default() else None",
            "if True else None",
            _NUMBER + "test_what_was_set_stays",
        ),
    ),
    *mutants(
        "canary_obs/engines/toolkit/service_process.py",
        (
            "    while os.getppid() == {parent}:",
            "    while {parent}:",
            _PROCESS + "test_the_service_ends_with_its_parent",
        ),
        (
            "delay = min(2 * delay, _LAST_DELAY_SECONDS)",
            "delay = min(delay, _LAST_DELAY_SECONDS)",
            _PROCESS + "test_restarts_come_ever_later_and_a_failed_one_is_tried_again",
        ),
        (
            "            except OSError as error:  # no",
            "            except ValueError as error:  # no",
            _PROCESS + "test_restarts_come_ever_later_and_a_failed_one_is_tried_again",
        ),
    ),
    *mutants(
        "canary_obs/serve.py",
        (
            "            if time.monotonic() >= deadline:\n",
            "            if time.monotonic() >= deadline - seconds:\n",
            _SERVE + "test_a_service_waits_until_port_and_endpoint_are_free",
        ),
        (
            "            reported = True\n",
            "            reported = False\n",
            _SERVE + "test_a_service_waits_until_port_and_endpoint_are_free",
        ),
    ),
    *mutants(
        "canary_obs/service/context.py",
        (
            "if wait and (paused := self.paused_ranks(request.selection)):",
            "if not wait and (paused := self.paused_ranks(request.selection)):",
            "tests/service/test_app.py::test_waiting_for_a_sweep_while_paused_is_refused_at_once",
        ),
        (
            "timeout=min(left, PAUSE_CHECK_SECONDS)",
            "timeout=left",
            "tests/service/test_app.py::test_a_pause_ends_the_wait_for_a_sweep",
        ),
    ),
    *mutants(
        "canary_obs/runtime/sweep/sweeper.py",
        (
            'elif not seen["checked"]:',
            'elif not seen["comparable"] < 0:',
            "tests/runtime/sweep/test_sweeper.py::test_a_sweep_that_checked_nothing_says_so",
        ),
    ),
)
