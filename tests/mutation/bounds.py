"""Seeded defects of bounds of what is read from the device, and of the rotation over layers."""

from __future__ import annotations

from tests.mutation.mutant import mutants

_BOUNDS = "tests/kernels/test_bounds.py::"
_LENGTHS = _BOUNDS + "test_impossible_lengths_are_reported_and_never_an_index"
_LISTS = _BOUNDS + "test_digests_of_lists_that_cannot_be"
_INPUTS = _BOUNDS + "test_digests_of_inputs_that_cannot_be"

WRITE_KERNEL = mutants(
    "kernels/canary_kernels/write/kernel.py",
    (
        "(first_token <= num_tokens - extend)",
        "(first_token <= num_tokens)",
        _LENGTHS + "[token_starts-7-dtype12-Backend.TRITON]",
    ),
    ("inside = (prefix >= 0) & (prefix <= capacity)", "inside = (prefix >= 0)", _LENGTHS),
    ("tl.where(inside, extend, 0), first_token", "extend, first_token", _LENGTHS),
)

WRITE_REFERENCE = mutants(
    "kernels/canary_kernels/write/reference.py",
    ("inside &= (extend == 0) | ((first >= 0) &", "inside &= (extend == 0) | (", _LENGTHS),
    ("    live = live[_inside(buffers, batch, live)]\n", "    _inside(buffers, batch, live)\n", _LENGTHS),
)

DIGESTS = mutants(
    "kernels/canary_kernels/digest/kernel.py",
    ("known & (stop >= 0) & (stop <= width)", "known & (stop >= 0)", _LISTS),
)

_ROTATION = "tests/runtime/test_layer_writes.py::"
_LAYER = _ROTATION + "test_a_layer_that_is_never_written_is_found_within_as_many_forwards"
_WRITES = "tests/kernels/test_layer_write.py::test_each_layer_is_checked_by_itself"

ROTATION = mutants(
    "canary_obs/runtime/device/layer_rotation.py",
    ("(self._next + 1) % len(self._plans)", "self._next % len(self._plans)", _LAYER),
)

LAYER_KERNEL = mutants(
    "kernels/canary_kernels/layer_write/kernel.py",
    (
        "replaced = (state_of(old) == COMPLETE) & (",
        "replaced = (state_of(old) >= 0) & (",
        _WRITES,
    ),
    (
        "(before_k == hash_k) & (replaced | zero_k)",
        "(before_k == hash_k) & replaced",
        _WRITES,
    ),
)

LAYER_REFERENCE = mutants(
    "kernels/canary_kernels/layer_write/reference.py",
    ("(((old ^ identity) & _LOW_WORD) != 0)", "(old != identity)", _WRITES),
)

ALL = ROTATION + LAYER_KERNEL + LAYER_REFERENCE + WRITE_KERNEL + WRITE_REFERENCE + DIGESTS
