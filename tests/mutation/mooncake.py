"""Defects of following what Mooncake sends and receives; killed by tests without an engine."""

from __future__ import annotations

from tests.mutation.mutant import mutants

_RECORDS = "tests/engines/vllm/test_mooncake_records.py::"

ALL = mutants(
    "canary_obs/engines/vllm/mooncake_records.py",
    (
        "if transfer not in self._waiting:",
        "if True:",
        _RECORDS + "test_records_are_kept_until_nothing_is_sent_any_more",
    ),
    (
        "ended = [name for name, each in self._sending.items() if each.request in requests]",
        "ended = list[str]()",
        _RECORDS + "test_records_are_kept_until_nothing_is_sent_any_more",
    ),
    (
        "if sending is not None and sending.blocks:",
        "if sending is not None:",
        _RECORDS + "test_a_prompt_that_was_not_handed_over_yet_has_no_records",
    ),
    (
        "for transfer in metadata.reqs_not_processed:",
        "for transfer in ():",
        _RECORDS + "test_a_prompt_that_is_not_sent_leaves_nothing_behind",
    ),
    (
        "if pull is not None and request not in failed:",
        "if pull is not None:",
        _RECORDS + "test_of_a_receive_that_failed_nothing_is_kept",
    ),
    (
        'getattr(meta, "remote_tp_size", 1) // self._ranks',
        'getattr(meta, "remote_tp_size", 1)',
        _RECORDS + "test_a_decode_engine_of_as_many_ranks_is_sent_whole_records",
    ),
    (
        "shares[place][group.view.name] =",
        "shares[0][group.view.name] =",
        _RECORDS + "test_a_rank_that_holds_some_of_the_heads_takes_its_share_of_them",
    ),
    (
        "shares = [share for each in records for share in each.shares]",
        "shares = records[0].shares",
        _RECORDS + "test_answers_of_two_ranks_make_up_what_one_receives",
    ),
    (
        "self._seals.open(text, pull.host, pull.engine, pull.transfer)",
        "self._seals.open(text, pull.host, pull.engine, 't')",
        _RECORDS + "test_records_of_another_transfer_are_not_believed",
    ),
)
