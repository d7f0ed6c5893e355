"""Loads and states on the V2 model runner: a few of the tests that the V1 runner passes, from each file."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.engines.vllm.real.server import Process

# Each file starts engines of its own.
TESTS = {
    "test_healing.py": [
        "a_damaged_idle_block_is_not_read_again",
        "who_has_sent_a_token_from_damage_is_ended_also_when_it_holds_the_block_no_more[later]",
        "a_dry_run_says_what_protect_then_does[used]",
    ],
    "test_nixl.py": ["what_was_sent_is_what_is_received", "damage_at_the_sender_is_found_at_the_receiver"],
    "test_offloading.py": ["what_was_stored_is_what_is_loaded[True]", "a_load_that_copied_nothing_is_lost"],
    "test_failed_loads.py": ["a_failure_that_the_scheduler_ignores_is_found[request]"],
    "test_states.py": [
        "a_state_moves_to_the_next_block_and_is_joined_from_the_cache",
        "a_flip_in_a_running_state_is_found_before_the_next_forward_overwrites_it",
    ],
}
SECONDS = 400.0


@pytest.mark.timeout(SECONDS + 40)
def test_loads_and_states_on_v2(tmp_path: Path) -> None:
    here = Path(__file__).parent
    names = [f"{here / file}::test_{name}" for file, tests in TESTS.items() for name in tests]
    process = Process([sys.executable, "-m", "tests.engines.vllm.real.on_v2", *names], {}, tmp_path / "log")
    try:
        ended = process.wait(SECONDS)
    finally:
        process.stop()
    log = process.log.read_text()
    assert ended == 0, log[-12000:]
    assert f"{len(names)} passed" in log
