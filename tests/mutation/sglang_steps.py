"""Seeded defects of what SGLang's adapter does in every step on a GPU."""

from __future__ import annotations

from tests.mutation.mutant import mutants

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
)
