"""Seeded defects of the comparison of a worker's tokens with the scheduler's."""

from __future__ import annotations

from tests.mutation.mutant import mutants

_KNOWN = "tests/kernels/test_records.py::test_tokens_are_compared_with_what_the_scheduler_knows"
_LAG = "tests/kernels/test_records.py::test_what_a_scheduler_knew_long_ago_is_not_compared"
_CHAINS = "tests/engines/vllm/test_token_chains.py::"
_LOADED = _CHAINS + "test_what_was_said_of_a_load_is_not_believed_later"
_ANY_ORDER = _CHAINS + "test_chains_are_those_of_the_tokens_known"
_DECODING = _CHAINS + "test_chains_of_decoding_requests"
_WENT_ON = _CHAINS + "test_a_step_in_which_all_went_on_looks_at_their_new_tokens_alone"
_OUTPUTS = _CHAINS + "test_an_output_that_does_not_go_on_by_one_token_of_each"
_BEFORE = _CHAINS + "test_chains_of_prompts_are_computed_before_what_follows"
_REST = "tests/runtime/test_replays.py::test_what_a_scheduler_says_later_is_compared"
_COLUMNS = "tests/engines/toolkit/test_known_tokens.py::"
_OWED = "tests/runtime/test_known_tokens.py::"

_EACH = "tests/kernels/test_digest.py::test_chains_are_extended_one_by_one"

ALL = (
    *mutants(
        "kernels/canary_kernels/digest/cpu.py",
        ("store_int64(state, place, position + 1)", "store_int64(state, place, position)", _EACH),
        ("!= load_int64(given, place):", "< load_int64(given, place) - 1:", _EACH),
    ),
    *mutants(
        "kernels/canary_kernels/digest/reference.py",
        ("        np.add(counts, 1, out=counts)\n", "", _EACH),
        ("if (counts + ahead != before).any():", "if (counts + ahead != before).all():", _EACH),
    ),
    *mutants(
        "kernels/canary_kernels/verify/kernel.py",
        ("(known_len + KNOWN_LAG > prefix)", "(known_len > 0)", _LAG),
    ),
    *mutants(
        "kernels/canary_kernels/verify/digests.py",
        (
            "count(buffers[0], COUNT_TOKENS_LEFT_OUT, 1 - one)",
            "count(buffers[0], COUNT_TOKENS_LEFT_OUT, one)",
            _KNOWN,
        ),
        ("PHASE * NUM_REASONS + WRITE_TOKEN_REASON", "PHASE * NUM_REASONS + TOKEN_REASON", _KNOWN),
    ),
    *mutants(
        "kernels/canary_kernels/verify/reference.py",
        (
            "if phase is Phase.TAIL and batch.known_lens is not None",
            "if batch.known_lens is not None",
            _KNOWN,
        ),
        ("buffers.counters[COUNT_TOKENS_LEFT_OUT] += rows.shape[0] - compared", "pass", _KNOWN),
    ),
    *mutants(
        "kernels/canary_kernels/verify/cpu.py",
        ("    if length + _KNOWN_LAG <= column(batch, PREFIX_LENS, request):\n        return 0\n", "", _LAG),
    ),
    *mutants(
        "canary_obs/engines/vllm/token_chains.py",
        ("if counts[place] > length >= 0:", "if counts[place] > length < -1:", _ANY_ORDER),
        ("(sent[0] - starts == 1).all()", "(sent[0] - starts >= 1).all()", _ANY_ORDER),
        (
            "self._known[name] = tokens.size, int(after)",
            "self._known[name] = tokens.size - 1, int(after)",
            _LOADED,
        ),
        ("                self._due.pop(request, None)\n", "", _LOADED + "[ended a step later]"),
        ("lens = list(map(min, computed, lens))", "pass", _ANY_ORDER),
        (
            "counts[place], lens[place], tokens[place] = 0, -1, ()",
            "pass",
            _CHAINS + "test_nothing_is_known_of_a_prompt_without_tokens",
        ),
        (
            "                self._known.pop(request, None)\n",
            "                pass\n",
            _CHAINS + "test_a_request_that_ended_may_come_back_with_other_tokens",
        ),
        (
            "self.names == list(scheduled)",
            "len(self.names) == len(scheduled)",
            _CHAINS + "test_another_request_that_is_as_far_is_not_taken_for_the_one_before",
        ),
        (
            " and list(map(requests.get, self.names)) == self._found",
            "",
            _CHAINS + "test_another_request_of_the_same_name_is_computed_anew",
        ),
        (
            "if self._extend(computed, newest) else None",
            "if self._extend(computed, newest) is not None else None",
            _CHAINS + "test_a_preempted_request_that_knows_the_next_token_is_computed_anew",
        ),
        (
            "if self._is_ahead and sum(",
            "if not self._is_ahead and sum(",
            _CHAINS + "test_requests_whose_newest_tokens_are_not_known_yet",
        ),
        ("            deque(map(_SKIP_TO, following, counts), maxlen=0)\n", "", _WENT_ON),
        ("        self._known += len(newest)\n", "", _WENT_ON + "[1]"),
        ("return self._state.copy() if", "return self._state if", _WENT_ON),
        (
            "            self._decoding = None  # if this fails",
            "            pass  # if this fails",
            _CHAINS + "test_a_token_that_is_none_costs_its_step_alone",
        ),
        ("return self._state[0].tolist(),", "return (self._state[0] - 1).tolist(),", _DECODING),
        (
            "one_each = total == count and ",
            "one_each = ",
            _OUTPUTS + "[tokens]",
        ),
        (" and cached.req_ids == list(scheduled)", "", _OUTPUTS + "[order]"),
        (
            "        if requests:\n            self._leave_decoding()\n",
            "        if requests:\n",
            _DECODING,
        ),
    ),
    *mutants(
        "canary_obs/engines/vllm/token_chains.py",
        ("        if self._later is not None:\n            self.settle()\n", "", _BEFORE + "[an output]"),
        ("        self.settle()\n        if requests:\n", "        if requests:\n", _BEFORE + "[an end]"),
    ),
    *mutants(
        "canary_obs/engines/toolkit/later.py",
        (
            "compute, self._compute = self._compute, None",
            "compute = self._compute",
            _CHAINS + "test_chains_of_prompts_are_computed_when_they_are_asked_for",
        ),
        ("return _same, (self.get(),)", "return _same, (None,)", _BEFORE + "[a copy for another process]"),
    ),
    *mutants(
        "canary_obs/runtime/forward.py",
        ("            rest()\n", "", _REST),
        (
            "start_forward(self._state.backend, *given, rows=False)",
            "pass",
            _REST,
        ),
    ),
    *mutants(
        "canary_obs/engines/toolkit/known_tokens.py",
        (
            "        self.stage(step)  # with",
            "        self._given = None\n        self.stage(step)  # with",
            _COLUMNS + "test_a_device_that_is_late_takes_rows_and_known_tokens",
        ),
        (
            "            self._sent, self._later = self._later.get(), None\n        self.stage",
            "            pass\n        self.stage",
            _COLUMNS + "test_columns_that_are_needed_at_once_are_computed_at_once",
        ),
        (
            "        self.stage(self._forwards)\n",
            "        self._given = None\n        self.stage(self._forwards)\n",
            _COLUMNS + "test_rows_that_are_needed_at_once_are_taken_with_columns_that_were_to_come_later",
        ),
        (
            "np.array(list(map(known.get, requests, repeat(-1))), dtype=np.intp)",
            "np.arange(len(requests))",
            _COLUMNS + "test_columns_are_in_the_order_of_the_batch",
        ),
        (
            "if address != self._addresses[number]:",
            "if not self._addresses[number]:",
            _COLUMNS + "test_a_row_of_the_ring_that_is_used_again_holds_another_batch",
        ),
        (
            "        if count != self._count:\n",
            "        if not self._count:\n",
            _COLUMNS + "test_a_row_of_the_ring_that_is_used_again_holds_another_batch",
        ),
        (
            "self.same = requests == sent",
            "self.same = len(requests) == len(sent)",
            _COLUMNS + "test_columns_are_in_the_order_of_the_batch",
        ),
        (
            "room[0, order.unknown] = -1",
            "pass",
            _COLUMNS + "test_a_request_of_which_nothing_was_said_is_unknown",
        ),
        (
            "order.requests != requests or order.sent != self._sent_of",
            "order.requests != requests",
            _COLUMNS + "test_another_order_is_noticed",
        ),
        (
            "order.requests != requests or order.sent != self._sent_of",
            "order.sent != self._sent_of",
            _COLUMNS + "test_another_order_is_noticed",
        ),
    ),
    *mutants(
        "canary_obs/runtime/forward.py",
        (
            "                launched.requests += due if due > 0 else 0\n",
            "",
            _OWED + "test_a_comparison_that_is_not_launched_is_missed",
        ),
        (
            "        self._compared = self._scheduled() or 0\n        for group",
            "        for group",
            _OWED + "test_a_forward_that_failed_is_due_none",
        ),
    ),
    *mutants(
        "canary_obs/runtime/check_coverage.py",
        (
            "if left_out > (1 - self._target) * requests:",
            "if left_out > requests:",
            _OWED + "test_requests_that_are_left_out_are_a_debt",
        ),
    ),
)
