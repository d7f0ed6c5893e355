"""Seeded defects of the verdicts on GPUs."""

from __future__ import annotations

from tests.mutation.mutant import mutants

_RULES = "tests/fleet/test_verdict.py::"
_CASES = _RULES + "test_the_code_judges_each_case"
_BITS = "tests/test_bit_statistics.py::"
_DAMAGE = "tests/hub/test_damage_account.py::"

VERDICT = mutants(
    "canary_obs/fleet/verdict.py",
    (
        "peers = total.findings - min(exposure.periods, thresholds.PEER_FINDINGS)",
        "peers = total.findings",
        _CASES,
    ),
    (
        "own.findings += min(exposure.periods, thresholds.PEER_FINDINGS)",
        "own.findings += exposure.periods",
        _RULES + "test_one_bad_part_does_not_hide_another",
    ),
    ("(peers + thresholds.PRIOR_FINDINGS)", "(peers + 0)", _CASES),
    ("if number >= thresholds.RELEASE_GPUS and carries:", "if False:", _CASES),
    (
        "+ thresholds.XID_SCORE * xids",
        "",
        _RULES + "test_what_the_driver_says_raises_the_score",
    ),
    ("        verdict = Verdict.LINK\n", "        pass\n", _CASES),
)

BITS = mutants(
    "canary_obs/bit_statistics.py",
    (
        "TO_ONE if after >> bit & 1 else TO_ZERO",
        "TO_ZERO if after >> bit & 1 else TO_ONE",
        _BITS + "test_bits_are_numbered_from_the_least_significant_with_their_direction",
    ),
    (
        "bits.total() >= RECURRENCES",
        "bits",
        _BITS + "test_a_stuck_bit_is_one_position_in_one_direction",
    ),
)

DAMAGE = mutants(
    "canary_obs/hub/damage_account.py",
    (
        "evidence.history[-1].kind is SlotEventKind.RECEIVED",
        "evidence.history[0].kind is SlotEventKind.RECEIVED",
        _DAMAGE + "test_a_block_counts_as_transferred_while_nothing_was_written_over_it",
    ),
    (
        "if len(bits) <= FEW_BITS:",
        "if bits:",
        _DAMAGE + "test_words_that_were_written_over_are_no_flips_and_intact_slots_no_damage",
    ),
)

ALL = (*VERDICT, *BITS, *DAMAGE)
