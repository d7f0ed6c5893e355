"""Defects seeded in what is done about damage."""

from __future__ import annotations

from tests.mutation.mutant import mutants

_HEALER = "tests/healing/test_healer.py::test_"
_LINEAGE = "tests/healing/test_lineage.py::test_"

DECIDED = mutants(
    "canary_obs/healing/plan.py",
    (
        "damage.good >= view.given_out",
        "damage.good >= 0",
        _HEALER + "tokens_of_forwards_that_are_known_to_be_good_do_not_end_a_request",
    ),
    (
        "held.sent <= (before or 0)",
        "held.sent == 0",
        _HEALER + "who_read_damage_before_it_was_written_over_is_ended_and_what_came_of_it_leaves",
    ),
    (
        "for block in damage.filled for key",
        "for block in () for key",
        _HEALER + "who_read_damage_before_it_was_written_over_is_ended_and_what_came_of_it_leaves",
    ),
    (
        "keys = lineage.descendants(roots)",
        "keys = roots",
        _HEALER + "evict_takes_all_that_was_computed_from_it_and_starts_what_has_sent_nothing_again",
    ),
    (
        "view.finished_keys(damage.request) if victim is None",
        "() if victim is None",
        _HEALER + "what_a_request_computed_is_found_after_it_has_ended",
    ),
    (
        "() if damage.kv_intact else requests",
        "requests",
        _HEALER + "a_damaged_record_costs_the_block_and_no_request",
    ),
    (
        "held.restarts < MOST_RESTARTS",
        "True",
        _HEALER + "a_request_is_not_computed_again_for_ever",
    ),
    (
        "return written and held.since <= damage.found",
        "return written",
        _HEALER + "what_was_written_over_since_harms_nobody",
    ),
    (
        "damage.fresh or position < held.computed",
        "damage.fresh or True",
        _HEALER + "what_was_written_over_since_harms_nobody",
    ),
    (
        "(any(held.blocks) or not damage.again)",
        "True",
        _HEALER + "a_request_that_was_started_again_does_not_end_for_what_is_met_once_more",
    ),
    (
        "_is_anew(held, damage) and held.kept <= before",
        "False",
        _HEALER + "who_went_on_since_readers_were_listed_is_judged_by_what_it_had_sent_by_then",
    ),
    (
        "if anew and size:",
        "if size:",
        _HEALER + "who_joined_what_was_computed_from_damage_before_it_left_starts_again",
    ),
    (
        "blocks = blocks[: -(-held.joined // size)]",
        "pass",
        _HEALER + "who_joined_what_was_computed_from_damage_before_it_left_starts_again",
    ),
    (
        "held.dropped_after < damage.found",
        "False",
        _HEALER + "what_was_dropped_when_a_request_started_again_does_not_end_it",
    ),
)

LIMITED = mutants(
    "canary_obs/healing/guard_rail.py",
    ("if spent > self._actions:", "if False:", _HEALER + "a_flood_of_findings_stops_at_the_limit"),
    (
        "elif lost > self._share * pool:",
        "elif False:",
        _HEALER + "a_tree_larger_than_the_share_of_the_pool_stays",
    ),
    ("now - self._done[0][0] >= SECONDS", "False", _HEALER + "limits_are_of_one_minute"),
    (
        "spent, lost = self._spent + actions, self._lost + blocks",
        "spent, lost = actions + sum(e[1] for e in self._done), blocks + sum(e[2] for e in self._done)",
        _HEALER + "a_limit_is_told_by_a_sum_and_not_by_all_actions_of_the_minute",
    ),
)

DONE = mutants(
    "canary_obs/healing/healer.py",
    (
        "left[group].difference_update(others)",
        "pass",
        _HEALER + "blocks_that_nobody_caches_or_holds_any_more_are_said_once",
    ),
    (
        " if not self._actor.keys_of(one))",
        ")",
        _HEALER + "blocks_that_nobody_caches_or_holds_any_more_are_said_once",
    ),
    (
        "        if self.effective is HealPolicy.DRY_RUN:\n            self._say",
        "        if self.policy is HealPolicy.DRY_RUN:\n            self._say",
        _HEALER + "an_engine_that_does_not_agree_with_the_rehearsal_gets_a_dry_run",
    ),
    (
        "        self._problem = f\"an action failed",
        "        self._left = f\"an action failed",
        _HEALER + "an_action_that_fails_ends_healing_until_an_operator_chooses",
    ),
    (
        "self._generations.get(block, 0) + 1",
        "self._generations.get(block, 0)",
        _HEALER + "a_slot_that_is_damaged_again_after_it_was_written_anew_leaves_circulation",
    ),
    (
        "        if damage.overwritten:\n",
        "        if False:\n",
        _HEALER + "what_was_written_over_says_nothing_about_the_memory",
    ),
    (
        "len(self.quarantined) + 1 > self._share",
        "0 > self._share",
        _HEALER + "quarantine_takes_no_more_than_the_share_of_the_pool",
    ),
    (
        "        except QuarantineRefused as refused:",
        "        except KeyError as refused:",
        _HEALER + "a_block_that_the_engine_cannot_do_without_stays_and_healing_goes_on",
    ),
)  # fmt: skip

_COPY = _HEALER + "a_dry_run_leaves_out_what_comes_back_from_a_copy_that_would_have_left"
_LATER = _HEALER + "a_dry_run_leaves_out_what_a_request_caches_after_it_would_have_ended"

SAID = mutants(
    "canary_obs/healing/dry_run.py",
    (
        "            if not self._first(None, damage.request):",
        "            if False:",
        _HEALER + "a_dry_run_leaves_out_what_a_request_reads_after_it_would_have_started_again",
    ),
    (
        "if (readers is None or one in readers) and self._acts(action, one)",
        "if self._acts(action, one)",
        _HEALER + "a_dry_run_leaves_out_who_is_given_a_block_that_would_have_left",
    ),
    ("if damage.request is None and self._is_copy(content, damage):", "if False:", _COPY),
    (
        "(other, request) not in self._said and ",
        "",
        _HEALER + "a_dry_run_says_one_thing_of_a_request",
    ),
    ("            if not harmed(held, damage):", "            if True:", _LATER),
    (
        "for block, own in keys.items() if not self._is_gone(own, damage)]",
        "for block, own in keys.items()]",
        _HEALER + "a_dry_run_says_of_each_block_once_that_it_would_have_left",
    ),
    (
        "                cached += sum(",
        "                sum(",
        "tests/engines/reference/test_dry_run.py::"
        "test_a_dry_run_knows_what_is_cached_of_a_request_that_starts_again",
    ),
    (
        "damage.slot) and damage.again:",
        "damage.slot) and False:",
        _HEALER + "a_dry_run_leaves_out_what_was_damaged_before_its_page_was_full",
    ),
)  # fmt: skip

REFUSED_ONCE = mutants(
    "canary_obs/runtime/healing.py",
    (
        "if fresh and group not in self._refused:",
        "if fresh:",
        "tests/runtime/test_repair.py::test_a_group_of_which_nothing_can_be_repaired_is_named_once",
    ),
)  # fmt: skip

REMEMBERED = mutants(
    "canary_obs/healing/lineage.py",
    (
        "if key in self._children or self._cached(key):",
        "if self._cached(key):",
        _LINEAGE + "a_prefix_that_is_not_cached_keeps_what_goes_on_from_it",
    ),
    ("self._forget(2 * added)", "self._forget(0)", _LINEAGE + "memory_stays_within_twice_of_what_is_cached"),
)

_REFERENCE = "tests/engines/reference/test_healing.py::test_"

IN_THE_REFERENCE_ENGINE = (
    *mutants(
        "canary_obs/reference_engine/scheduling/scheduler.py",
        (
            "kept = min(kept, attached)",
            "kept = min(kept, request.shared)",
            _REFERENCE + "what_requests_use_is_freed_once_after_it_was_discarded",
        ),
    ),
    *mutants(
        "canary_obs/engines/reference/heal_actions.py",
        (
            'return None if enough else "what is left would not hold one request"',
            "return None",
            "tests/engines/reference/test_heal_storm.py::test_quarantine_leaves_room_for_the_longest_request",
        ),
        (
            "self._out[place] -= 1",
            "self._out[place] += 0",
            "tests/engines/reference/test_heal_storm.py::test_a_storm_of_healing_leaves_a_clean_engine",
        ),
    ),
    *mutants(
        "canary_obs/engines/reference/request_changes.py",
        (
            "request.serial == self._ending",
            "request.serial == -1",
            _REFERENCE + "nothing_wrong_leaves_after_detection_and_nothing_leaks",
        ),
    ),
)

_ACCOUNT = "tests/service/test_heal_account.py::test_"

SEEN = (
    *mutants(
        "canary_obs/service/event_stream.py",
        ("            self._heals = heal.number\n", "", _ACCOUNT + "in_its_incident_and_as_an_event"),
    ),
    *mutants(
        "canary_obs/hub/heal_store.py",
        (
            "incident = self._incidents.id_for(message.identity, heal.incident)",
            "incident = heal.incident",
            _ACCOUNT + "in_its_incident_and_as_an_event",
        ),
    ),
    *mutants(
        "canary_obs/telemetry/tracing.py",
        ("            export_heal(spans, heal)\n", "", _ACCOUNT + "as_a_span"),
    ),
)

ORDERED = mutants(
    "canary_obs/healing/damage.py",
    (
        "damage.good is not None or damage.again)",
        "damage.good is not None)",
        "tests/healing/test_damage.py::test_what_may_end_a_request_goes_first_unless_it_was_found_before",
    ),
)

_RANKS = "tests/engines/vllm/test_heal_ranks.py::test_"

OF_RANKS = (
    *mutants(
        "canary_obs/engines/vllm/heal_ranks.py",
        (
            "if rank != output_rank\n",
            "if rank == output_rank\n",
            _RANKS + "the_output_of_one_rank_brings_what_the_others_found",
        ),
        (
            "if self._own is not None:",
            "if False:",
            _RANKS + "an_aggregator_that_vllm_has_goes_first",
        ),
        (
            "outputs[output_rank] = result  #",
            "#",
            _RANKS + "the_output_of_one_rank_brings_what_the_others_found",
        ),
    ),
    *mutants(
        "canary_obs/engines/vllm/heal_link.py",
        (
            "due = self._outbox.due and self._heard",
            "due = self._outbox.due",
            _RANKS + "a_rank_keeps_what_it_found_until_its_results_are_taken",
        ),
        (
            " and block != NULL_BLOCK]",
            "]",
            "tests/engines/vllm/test_block_slots.py::"
            "test_records_of_blocks_that_healing_leaves_to_nobody_are_emptied",
        ),
    ),
)

_REPAIR = "tests/runtime/test_repair.py::test_"
REPAIRED = (
    *mutants(
        "canary_obs/runtime/repair.py",
        (
            "if len(changes) != 1:",
            "if not changes:",
            _REPAIR + "a_change_that_two_words_would_explain_is_left",
        ),
        (
            "found.append(_Change(slot, part, suspect, holds, change.original))",
            "found.append(_Change(slot, part, suspect, holds, change.original ^ 1))",
            _REPAIR + "every_change_of_one_word_is_put_back",
        ),
        (
            "if state in _UNKNOWN:",
            "if False:",
            _REPAIR + "all_slots_of_a_block_are_put_back_or_none",
        ),
    ),
    *mutants(
        "canary_obs/runtime/delivery.py",
        (
            "[row for place, row in enumerate(found) if place not in cured]",
            "found",
            _REPAIR + "a_row_that_is_late_is_no_new_damage",
        ),
    ),
    *mutants(
        "canary_obs/runtime/put_back.py",
        (
            "return row.event <= failed[lane]",
            "return False",
            _REPAIR + "damage_that_two_checks_met_is_put_back_once",
        ),
    ),
    *mutants(
        "canary_obs/runtime/healing.py",
        (
            "gone = rows if self._repair(",
            "gone = fresh if self._repair(",
            _REPAIR + "damage_that_two_checks_met_is_put_back_once",
        ),
        (
            "return [row for row in found if id(row) not in repaired]",
            "gone = [row for row in found if id(row) in repaired]\n"
            "        return [row for row in found if row not in gone]",
            _REPAIR + "a_full_log_is_not_compared_row_by_row",
        ),
        (
            "if self.policy is HealPolicy.REPAIR and self._guard.closed is not None:",
            "if False:",
            _REPAIR + "beyond_the_limit_damage_is_left_to_the_scheduler_and_the_state_tells",
        ),
    ),
)

ACCOUNTED = mutants(
    "canary_obs/runtime/healing.py",
    (
        "incident=incident or None, detail=detail",
        "incident=None, detail=detail",
        "tests/cli/test_healing_run.py::test_each_action_is_in_incidents_events_metrics_and_commands",
    ),
)

ALL = (
    *ACCOUNTED,
    *REPAIRED,
    *REFUSED_ONCE,
    *SEEN,
    *OF_RANKS,
    *ORDERED,
    *IN_THE_REFERENCE_ENGINE,
    *DECIDED,
    *LIMITED,
    *DONE,
    *SAID,
    *REMEMBERED,
)
