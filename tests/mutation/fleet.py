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
        "peers = total.findings - _counted(exposure, links)",
        "peers = total.findings",
        _CASES,
    ),
    (
        "else min(exposure.periods, thresholds.PEER_FINDINGS)",
        "else exposure.periods",
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
    ("0 if exposure.gpu_uuid in links else ", "", _CASES),
    ("if peer != OTHER_PEERS and", "if", _RULES + "test_peers_that_are_not_told_apart_are_no_link"),
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
        "if row.peer is None or row.reason is not Reason.KV_DATA:",
        "if row.peer is None:",
        _DAMAGE + "test_bytes_count_as_transferred_when_they_arrived_damaged",
    ),
    (
        "if self._peers[rank] >= PEERS_KEPT:",
        "if False:",
        _DAMAGE + "test_peers_of_a_rank_are_bounded_and_none_is_lost",
    ),
    (
        "if len(bits) <= FEW_BITS:",
        "if bits:",
        _DAMAGE + "test_words_that_were_written_over_are_no_flips",
    ),
)

ARRIVALS = mutants(
    "canary_obs/runtime/announcements.py",
    (
        "self.state.arrivals.compared(self.state.now, peer, request)",
        "pass",
        "tests/runtime/test_transfer.py::test_records_that_arrive_are_compared_and_kept",
    ),
)

ALL = (*VERDICT, *BITS, *DAMAGE, *ARRIVALS)
