"""Seeded defects of launches that are replayed."""

from __future__ import annotations

from tests.mutation.mutant import mutants

_TESTS = "tests/runtime/test_replays.py::"
_SAME = _TESTS + "test_records_and_findings_are_those_of_launches_one_by_one"
_WAITS = _TESTS + "test_a_capture_waits_for_a_long_forward"
_LONG = _TESTS + "test_a_forward_that_computes_a_prompt_is_a_long_one"
_TURNS = _TESTS + "test_batches_that_take_turns_are_replayed_as_they_are_shown"
_MAY = _TESTS + "test_what_computes_as_many_and_few_tokens_of_each_request_may_repeat"
_CLOCK = _TESTS + "test_a_clock_that_is_not_where_a_replay_expects_it_is_set"
_START = "tests/kernels/test_forward_start.py::test_every_forward_gets_its_own_columns"
_AGAIN = "tests/kernels/test_forward_start.py::test_known_tokens_are_taken_anew_without_the_rows"
_EARLY = "tests/runtime/test_early_comparison.py::"
_AS_EARLY = _EARLY + "test_records_and_findings_are_the_same"
_FLIP_EARLY = _EARLY + "test_a_flip_is_found_by_the_early_comparison_with_its_forwards_number"
_OTHER_VIEW = _EARLY + "test_not_for_another_view_nor_while_one_is_under_way"
_OTHER_RECORDS = _EARLY + "test_not_after_anything_else_that_concerns_records"
_MISSED = _EARLY + "test_not_where_a_forward_was_missed"
_KEPT = _TESTS + "test_as_many_batches_are_kept_as_said"

ALL = (
    *mutants(
        "canary_obs/runtime/device/replays.py",
        ("self._kept.popitem(last=False)", "self._kept.popitem()", _KEPT),
        ("        self._kept.move_to_end(key)\n", "", _KEPT),
        ("if long or self._waited > FORWARDS_WAITED:", "if long:", _WAITS),
        ("            if long:\n                self.capture()\n", "", _WAITS),
        (" and self._kept.get(tuple(map(id, kept.parts))) is kept", "", _WAITS),
    ),
    *mutants(
        "canary_obs/runtime/device/state.py",
        ("self.now - before == FORWARD_TICKS and before >= 0", "before >= 0", _CLOCK),
        ("self.now if self._clock_set else -1, step", "self.now, step", _CLOCK),
    ),
    *mutants(
        "kernels/canary_kernels/forward_start/reference.py",
        ("host.row(int(value[0]) >> TICK_BITS)", "host.row(0)", _START),
        ("    value += ticks\n", "    pass\n", _START),
        ("start & 1 else", "start & 2 else", _START),
        ("if rows and (start", "if (start", _AGAIN),
    ),
    *mutants(
        "canary_obs/engine_api/launches.py",
        ("            self.due = False\n", "            pass\n", _TESTS + "test_what_nobody_launches_is_due"),
    ),
    *mutants(
        "canary_obs/runtime/device/batches.py",
        (
            "return None if found is None else self._show(*found)",
            "return None",
            _TESTS + "test_batches_that_take_turns_are_captured_once_each",
        ),
    ),
    *mutants(
        "canary_obs/runtime/forward.py",
        ("            self.head(self._owing)\n", "            pass\n", _SAME),
        (
            "                last.launch()\n                state.clock_is_set()\n",
            "                last.launch()\n",
            _SAME,
        ),
        ("                view.launches.due = False\n", "                pass\n", _SAME),
        ("long=not may_repeat(view)", "long=False", _LONG),
        ("renew(view, shown, may=may_repeat(view))", "renew(view, shown, may=True)", _MAY),
        ("renew(view, self._batches, may=may_repeat(view))", "renew(view, self._batches, may=True)", _MAY),
        (
            "                self._clock_late = False\n                state.clock_is_set()\n",
            "                pass\n",
            _EARLY + "test_an_announcement_between_head_and_tail_finds_the_clock_set",
        ),
        ("self._start_late if late else None", "None", _AS_EARLY),
        ("            self._start_late()\n", "", _AS_EARLY),
        ("self._clock_late = self._state.advance(step)", "self._state.advance(step)", _AS_EARLY),
        ("            self._launched.compared += 1\n", "            pass\n", _FLIP_EARLY),
        ("view is not self._batched or view", "view", _OTHER_VIEW),
        (
            "(state.now, state.adoptions.others) != self._began",
            "state.now != self._began[0]",
            _OTHER_RECORDS,
        ),
        (
            "(state.now, state.adoptions.others) != self._began",
            "state.adoptions.others != self._began[1]",
            _OTHER_RECORDS,
        ),
        ("not others and self._account.expects(view.groups)", "not others", _MISSED),
        ("last.view is not view or last.parts is not shown", "last.parts is not shown", _TURNS),
        ("last.view is not view or last.parts is not self._batches", "last.launch is None", _TURNS),
        (" and (tokens == requests or tokens % requests == 0)", "", _MAY),
        ("tokens <= FEW_TOKENS * requests and ", "", _MAY),
        (
            "                runs[layout.Phase.HEAD] += 1\n",
            "",
            _TESTS + "test_a_forward_that_fails_leaves_no_launch_behind",
        ),
    ),
    *mutants(
        "canary_obs/runtime/device/counter_reader.py",
        ("self._adoptions.others += self.delayed", "pass", _OTHER_RECORDS),
    ),
    *mutants(
        "canary_obs/runtime/launched_checks.py",
        ("        launches.head()\n", "        pass\n", _SAME),
        ("        verify_rows(group.backend, group.buffers, batch, layout.Phase.HEAD)\n", "", _SAME),
    ),
    *mutants(
        "canary_obs/runtime/early_comparison.py",
        ("self._clock.fill_(self._state.now)", "self._clock.fill_(0)", _FLIP_EARLY),
    ),
    *mutants(
        "canary_obs/runtime/canary.py",
        ("not (self._depth or self.injects) and", "not self.injects and", _OTHER_VIEW),
        (
            "not (self._depth or self.injects) and",
            "not self._depth and",
            _EARLY + "test_not_while_faults_are_injected",
        ),
    ),
    *mutants(
        "canary_obs/runtime/slot_hooks.py",
        (
            "            faults.guard(ObserverPart.HEAD, self._announcements.before)\n",
            "            pass\n",
            _SAME,
        ),
    ),
    *mutants(
        "canary_obs/runtime/canary.py",
        (
            "        self.checks.replays = None  # in",
            "        # in",
            _TESTS + "test_where_the_head_precedes_the_forward_nothing_waits_for_the_tail",
        ),
    ),
)
