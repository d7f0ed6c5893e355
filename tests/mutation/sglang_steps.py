"""Seeded defects of what SGLang's adapter does in a step on a GPU, and of sweeps there."""

from __future__ import annotations

from tests.mutation.mutant import mutants

_TESTS = "tests/engines/sglang/"
_WALK, _TIME = _TESTS + "test_node_walk.py::", "tests/runtime/sweep/test_sweep_time.py::"
_ROOM = _TIME + "test_a_chunk_that_the_budget_has_no_room_for_is_left_to_the_next_step"
_DECODE = "tests/kernels/test_decode.py::"
_LENGTHS = _DECODE + "test_lengths_that_the_table_cannot_have"

ALL = (
    *mutants(
        "kernels/canary_kernels/decode/reference.py",
        ("min(max(length, 0), width)", "max(length, 0) % width", _LENGTHS),
        (" if 0 <= row < num_rows else -1", "", _LENGTHS),
        ("    lengths += 1\n", "", _DECODE + "test_a_token_more_of_each"),
    ),
    *mutants(
        "kernels/canary_kernels/decode/kernel.py",
        ("tl.where(known, stop, 0)", "stop", _LENGTHS),
        ("tl.minimum(length, width)", "length", _LENGTHS),
        ("state == NEXT, chain", "state != NEXT, chain", _DECODE + "test_a_token_more_of_each"),
        (
            "tl.num_programs(1) * BLOCK",
            "tl.num_programs(1) * BLOCK * 2",
            _DECODE + "test_a_batch_that_decodes_for_many_steps",
        ),
    ),
    *mutants(
        "canary_obs/engines/sglang/node_walk.py",
        (
            "-1 if parent < 0 else self._last[parent]",
            "-1",
            _TESTS + "test_radix_tree.py::test_every_slot_follows_the_last_of_its_parent",
        ),
        (
            "                self._last[node] = int(slots[start - 1])\n",
            "",
            _TESTS + "test_radix_tree.py::test_every_slot_follows_the_last_of_its_parent",
        ),
        (
            "self._depths[node] + offset - start",
            "self._depths[node] - start",
            _WALK + "test_pieces_are_what_there_is_at_once",
        ),
        (
            "            if arrived is not None and not arrived.query():\n                return False\n",
            "",
            _WALK + "test_a_walk_is_ready_when_its_slots_have_come_and_frees_are_noted",
        ),
        (
            "0 if self._freed.noted() else self._waits + 1",
            "0",
            _WALK + "test_a_walk_is_ready_when_its_slots_have_come_and_frees_are_noted",
        ),
        (
            " or self._waits > _MOST_WAITS",
            "",
            _WALK + "test_a_walk_is_ready_when_its_slots_have_come_and_frees_are_noted",
        ),
    ),
    *mutants(
        "canary_obs/engines/sglang/radix_tree.py",
        (
            "        self._marks[group] = self._freed[group].mark()\n",
            "",
            _WALK + "test_what_the_tree_does_to_nodes_after_its_listing_does_not_matter",
        ),
    ),
    *mutants(
        "canary_obs/runtime/sweep/sweeper.py",
        (
            " and current.work[current.next_group][1].ready",
            "",
            _TIME + "test_a_sweep_waits_for_its_walk_in_later_steps",
        ),
        (
            "budget_seconds - current.began_seconds",
            "budget_seconds",
            _TIME + "test_the_start_of_a_sweep_is_taken_from_its_steps_budget",
        ),
        ("now + (now - before) + device", "now + device", _ROOM),
        (" + device_seconds > deadline", " > deadline", _ROOM),
    ),
)
