"""Loads, transfers, states, tokens of two ranks on the V2 model runner: some tests that V1 passes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.engines.vllm.real.server import Process
from tests.sizes import WHOLE

# Each file starts engines of its own.
TESTS = {
    "test_healing.py": [
        "a_damaged_idle_block_is_not_read_again",
        "who_has_sent_a_token_from_damage_is_ended_also_when_it_holds_the_block_no_more[later]",
        "a_dry_run_says_what_protect_then_does[used]",
        "a_flood_of_false_findings_empties_no_cache_and_ends_few_requests",
    ],
    "test_steady_step.py": ["replays_change_nothing"],
    "test_hook_calls.py": ["a_steady_step[1]", "a_steady_step[16]"],
    "test_taken_methods.py": ["nothing_holds_a_method_as_it_was"],
    "test_repair.py": ["a_block_in_use_is_put_back_and_who_has_sent_tokens_from_it_is_ended"],
    "test_offloading.py": ["what_was_stored_is_what_is_loaded[True]", "a_load_that_copied_nothing_is_lost"],
    "test_failed_loads.py": [
        "a_failure_that_the_scheduler_ignores_is_found[request]",
        "a_block_that_fails_with_the_forward_is_no_lost_load",
    ],
    "test_failed_drafts.py": ["with_drafts_a_block_that_fails_with_the_forward_is_no_lost_load"],
    "test_states.py": [
        "a_state_moves_to_the_next_block_and_is_joined_from_the_cache",
        "a_flip_in_a_running_state_is_found_before_the_next_forward_overwrites_it[123-False]",
        "two_requests_whose_states_are_exchanged_are_found",
        "what_a_forward_left_is_compared_before_one_that_is_not_shown",
    ],
}
TRANSFERS = {
    "test_nixl.py": [
        "what_two_ranks_send_is_what_one_receives",
        "what_each_connector_of_a_multi_connector_loads_is_compared",
    ]
}
SPREAD = {
    "test_sharded.py": [
        "answers_stay_and_nothing_is_found[1]",
        "a_flip_on_one_rank_is_found_there_in_its_slot[1-0]",
        "a_flip_on_one_rank_is_found_there_in_its_slot[1-1]",
    ]
}
SECONDS = 900.0


@pytest.mark.timeout(SECONDS + 40)
@pytest.mark.parametrize(
    "own",
    [
        pytest.param(TESTS, id="loads and states"),
        pytest.param(TRANSFERS, id="transfers", marks=pytest.mark.nightly),
        pytest.param(SPREAD, id="tokens of two ranks", marks=pytest.mark.nightly),
    ],
)
def test_on_v2(own: dict[str, list[str]], tmp_path: Path) -> None:
    here = Path(__file__).parent
    names = [f"{here / file}::test_{name}" for file, tests in own.items() for name in tests]
    # What has begun here is not skipped there: the time is over only for tests that come later.
    command = [sys.executable, "-m", "tests.engines.vllm.real.on_v2", *names]
    process = Process(command, {"CANARY_TESTS_UNTIL": "inf", WHOLE: "1"}, tmp_path / "log")
    try:
        ended = process.wait(SECONDS)
    finally:
        process.stop()
    log = process.log.read_text()
    assert ended == 0, log[-12000:]
    assert f"{len(names)} passed" in log
