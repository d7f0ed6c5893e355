"""Seeded defects of what the engine counts itself and what is compared with it."""

from __future__ import annotations

from tests.mutation.mutant import mutants

_FORWARDS = "tests/runtime/test_forward_account.py::"
_NOT_CALLED = _FORWARDS + "test_a_hook_that_is_not_called[llama]"

ACCOUNT = mutants(
    "canary_obs/runtime/forward_account.py",
    ("            self._state.by_name[name].adopt_all()\n", "            pass\n", _NOT_CALLED),
    (
        "if counts is not None and counts.get(name, 0) != begun[name]:",
        "if False:",
        _FORWARDS + "test_slots_are_adopted_before_the_next_forward_is_checked",
    ),
    (
        "if missing := counts.get(name, 0) - ended:",
        "if (missing := counts.get(name, 0) - ended) < 0:",
        _NOT_CALLED,
    ),
    (
        "missing[name] += max(0, count - self._begun[name])",
        "pass",
        _FORWARDS + "test_hooks_that_do_not_reach_the_canary_at_all",
    ),
    (
        "counted != self._ended and counted != self._unsettled",
        "False",
        _FORWARDS + "test_a_step_that_begins_while_an_idle_call_looks",
    ),
)

COMPARED = mutants(
    "canary_obs/runtime/canary.py",
    ("            self._or_disarm(self.forwards.settle)\n", "", _NOT_CALLED),
    (
        "        self.forwards.start()\n",
        "",
        "tests/runtime/test_forward_account.py::test_forwards_before_the_start_are_not_missed",
    ),
)

CHECKED = mutants(
    "canary_obs/runtime/forward.py",
    (
        "        self._batches = []\n        self._account.end()\n",
        "        self._batches = []\n",
        _FORWARDS + "test_a_clean_engine_is_in_balance",
    ),
)

COUNTED = mutants(
    "canary_obs/engines/reference/adapter.py",
    (
        "counts[DRAFT] = statistics.draft_forwards",
        "counts.pop(DRAFT)",
        _FORWARDS + "test_a_draft_pass_that_is_not_shown",
    ),
)

_COUNT = "tests/engines/vllm/test_forward_count.py::"
OUTPUTS = mutants(
    "canary_obs/engines/vllm/forward_count.py",
    (
        "self._count = max(self._count, number - self._first)",
        "pass",
        _COUNT + "test_an_output_that_came_past_the_worker_is_counted_by_the_next",
    ),
    (
        "if scheduler_output.total_num_scheduled_tokens:",
        "if True:",
        _COUNT + "test_only_outputs_with_tokens_count",
    ),
)

ALL = *ACCOUNT, *COMPARED, *CHECKED, *COUNTED, *OUTPUTS
