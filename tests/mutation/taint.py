"""Seeded defects of who is said to have read damage."""

from __future__ import annotations

from tests.mutation.mutant import mutants

_TRACKER = "tests/runtime/taint/test_tracker.py::"
_FORGOTTEN = _TRACKER + "test_finished_requests_that_are_forgotten_are_never_nobody"
_RESUMED = _TRACKER + "test_a_request_that_comes_back_with_tokens_from_damage_runs_on_as_a_tainted_one"
_DERIVED = _TRACKER + "test_blocks_that_a_reader_filled_taint_those_who_join_them"

READING = mutants(
    "canary_obs/runtime/taint/reading.py",
    ("int(last[gone].max()))", "-1)", _FORGOTTEN),
    (
        "            self._forgotten.update(names)\n",
        "            pass\n",
        _TRACKER + "test_requests_that_run_and_do_not_fit_are_not_known_until_they_end",
    ),
    (
        "waiting += [Reading(life, step, True) for life, step in held.joined_later(blocks, since)]",
        "pass",
        _DERIVED,
    ),
)

CHECKS = mutants(
    "canary_obs/runtime/taint/good_checks.py",
    ("joined & (starts < row.step)", "joined", _TRACKER + "test_the_hit_that_finds_it_is_none"),
    (
        "newest = row.step - 1 if row.phase is Phase.HEAD and not self.before_load(row) else row.step",
        "newest = row.step",
        _TRACKER + "test_what_a_drafting_request_wrote_over_was_read_by_who_held_the_slot_before",
    ),
    (
        "if passed is not None and passed <= latest:",
        "if passed is not None:",
        _TRACKER + "test_a_check_of_what_was_written_after_the_finding_is_none_of_it",
    ),
)

DOUBTS = mutants(
    "canary_obs/runtime/taint/doubts.py",
    (
        "        return self._outside()\n",
        "        return None\n",
        _TRACKER + "test_reasons_to_doubt",
    ),
)

_HELD = "tests/runtime/taint/test_held_blocks.py::"

HELD = mutants(
    "canary_obs/runtime/taint/held_blocks.py",
    (
        "(rows[_BLOCK, fills] == rows[_BLOCK])",
        "(rows[_BLOCK] >= 0)",
        _HELD + "test_as_row_by_row",
    ),
    (
        'joined[:, np.argsort(joined[_START], kind="stable")]',
        "joined",
        _HELD + "test_as_row_by_row",
    ),
)

TRACKER = mutants(
    "canary_obs/runtime/taint/tracker.py",
    (
        "(arrived or before_load or same or own.rewritten)",
        "(arrived or before_load or same)",
        _TRACKER + "test_a_state_that_its_request_writes_over_was_read_by_that_request_or_the_one_before",
    ),
    (
        "same = self._rewrites and not row.redetection",
        "same = self._rewrites",
        _TRACKER + "test_damage_met_once_more_as_its_block_is_filled_anew_is_not_the_one_that_comes_then",
    ),
    (
        "            self.watch.fill(name, added, life, copies.get(name, NO_BLOCKS))\n",
        "            pass\n",
        _TRACKER + "test_readers_after_the_finding_are_added_until_the_block_is_filled_again",
    ),
    (
        "                return  # its table is wrong, not the slot\n",
        "                pass\n",
        _TRACKER + "test_a_wrong_table_taints_its_request_alone",
    ),
    ("damage.note(self.readers.lives.up_to(life))", "damage.note([life])", _RESUMED),
    (
        "set(self.watch.carriers).union(*unsent, *earlier)",
        "set(self.watch.carriers).union(*unsent)",
        _RESUMED,
    ),
)

FILLED_ANEW = mutants(
    "canary_obs/runtime/taint/contents.py",
    (
        "read = joined | (starts <= written)",
        "read = joined | True",
        _TRACKER + "test_who_fills_a_block_anew_has_not_read_what_he_has_not_come_to",
    ),
)

RESUMED = mutants(
    "canary_obs/runtime/taint/damage.py",
    (
        "emitted is not None and emitted <= first",
        "False",
        _TRACKER + "test_a_request_that_started_again_before_it_sent_a_token_from_damage_is_cured",
    ),
    (
        "return Reached(row, ",
        "return Reached(self.row, ",
        _TRACKER + "test_a_damage_that_is_added_to_reaches_as_far_as_what_was_found_last",
    ),
)

CONTENTS = mutants(
    "canary_obs/runtime/taint/contents.py",
    (
        "if readers.computed_at(life, until - 1) > position:",
        "if True:",
        _TRACKER + "test_a_slot_that_the_next_holders_of_its_block_never_wrote",
    ),
    (
        "since == content.since else since - 1",
        "since == content.since else since",
        _TRACKER + "test_what_a_drafting_request_wrote_over_was_read_by_who_held_the_slot_before",
    ),
    (
        "lives.last[life] < until and",
        "True and",
        _TRACKER + "test_who_ended_after_he_wrote_over_damage_had_not_written_the_slot_before[False]",
    ),
    (
        "else min(now, content.until)",
        "else content.until",
        _TRACKER + "test_who_ended_after_he_wrote_over_damage_had_not_written_the_slot_before[True]",
    ),
    (
        "emitted <= before:",
        "False:",
        _TRACKER + "test_who_came_back_and_emitted_nothing_more_may_not_have_come_to_a_slot",
    ),
)

CAME_BACK = mutants(
    "canary_obs/runtime/taint/lives.py",
    (
        "            return self.emitted[before]\n",
        "            return None\n",
        _TRACKER
        + "test_what_a_request_read_after_it_came_back_is_another_damage_than_what_its_block_held_before",
    ),
)

REPAIRED = mutants(
    "canary_obs/runtime/taint/damage.py",
    (
        "return same and self.covers == 0 and self.cause is None",
        "return same",
        _TRACKER + "test_readers_of_a_slot_that_was_put_back_may_not_all_be_known",
    ),
) + mutants(
    "canary_obs/runtime/taint/tracker.py",
    (
        "        self._fresh[number] = self._fresh[number][0], True\n",
        "        pass\n",
        _TRACKER + "test_who_joins_a_slot_that_was_put_back_reads_no_damage",
    ),
)

ALL = (
    *DOUBTS,
    *HELD,
    *REPAIRED,
    *CONTENTS,
    *CAME_BACK,
    *READING,
    *CHECKS,
    *TRACKER,
    *FILLED_ANEW,
    *RESUMED,
)
