"""Records that travel with a transfer: sealed for one request, joined from shares."""

from __future__ import annotations

from base64 import b64decode, b64encode

import pytest

from canary_obs.copy_records.sent_records import Fold, GroupShare, Seals, SentRecords, joined

KEY = bytes(range(32))


def share(heads: range, folds: list[Fold | None], layers: range = range(2), form: int = 7) -> GroupShare:
    sources = [(layer, part, heads.start, len(heads)) for layer in layers for part in (0, 1)]
    return GroupShare(form, 4, sources, folds)


def records() -> SentRecords:
    return SentRecords("prefill", "r1", 9, [{"full": share(range(2), [(1, -2), None, (5, 6)])}])


def test_sealed_records_open_for_their_request_alone() -> None:
    seals = Seals(KEY)
    text = seals.seal(records())
    assert Seals(KEY).open(text, "10.0.0.7", "prefill", "r1") == records()
    assert seals.refused == 0
    assert seals.open(text, "10.0.0.7", "prefill", "r2") is None
    assert seals.open(text, "10.0.0.7", "decode", "r1") is None
    assert seals.refused == 2


@pytest.mark.parametrize("key", [None, KEY])
def test_every_changed_byte_is_refused(key: bytes | None) -> None:
    seals = Seals(key)
    data = bytearray(b64decode(seals.seal(records())))
    for place in range(len(data)):
        data[place] ^= 1
        assert seals.open(b64encode(data).decode(), "127.0.0.1", "prefill", "r1") is None
        data[place] ^= 1
    assert seals.refused == len(data)


@pytest.mark.parametrize("text", [None, 7, "", "%%%", "a" * 40, ["x"]])
def test_what_is_no_text_of_ours_is_refused(text: object) -> None:
    assert Seals(None).open(text, "127.0.0.1", "prefill", "r1") is None


@pytest.mark.parametrize(("host", "believed"), [("127.0.0.1", True), ("::1", True), ("localhost", True),
                                                ("10.0.0.7", False), ("prefill-0", False)])  # fmt: skip
def test_without_a_key_only_this_host_is_believed(host: str, believed: bool) -> None:
    seals = Seals(None)
    assert (seals.open(seals.seal(records()), host, "prefill", "r1") is not None) is believed


def test_another_key_is_refused() -> None:
    text = Seals(KEY).seal(records())
    assert Seals(bytes(32)).open(text, "127.0.0.1", "prefill", "r1") is None
    assert Seals(None).open(text, "127.0.0.1", "prefill", "r1") is None


def test_shares_of_heads_and_layers_sum_to_the_whole() -> None:
    own = share(range(4), [])
    heads = [share(range(2), [(1 << 62, 1), (3, 4)]), share(range(2, 4), [(1 << 62, -5), (5, 6)])]
    assert joined(heads, own) == [(-(1 << 63), -4), (8, 10)]
    layers = [share(range(4), [(1, 1)], range(1)), share(range(4), [(2, 3)], range(1, 2))]
    assert joined(layers, own) == [(3, 4)]
    assert joined(heads, share(range(2), [])) == [(1 << 62, 1), (3, 4)]


def test_replicas_count_once() -> None:
    replicas = [share(range(2), [(1, 1)]), share(range(2), [(1, 1)]), share(range(2, 4), [(2, 2)])]
    assert joined(replicas, share(range(4), [])) == [(3, 3)]


@pytest.mark.parametrize(
    "shares",
    [
        [],
        [share(range(2), [(1, 1)])],  # half of the heads
        [share(range(4), [(1, 1)], form=8)],  # made by other rules
        [share(range(3), [(1, 1)]), share(range(2, 4), [(1, 1)])],  # a head twice
        [share(range(2), [(1, 1)]), share(range(2, 4), [(1, 1), (2, 2)])],  # other blocks
        [share(range(8), [(1, 1)])],  # more than this rank holds: one sender's fold cannot be split
    ],
)
def test_shares_that_do_not_make_it_up_say_nothing(shares: list[GroupShare]) -> None:
    assert joined(shares, share(range(4), [])) == []


def test_a_block_that_one_rank_does_not_know_is_not_known() -> None:
    halves = [share(range(2), [(1, 1), None]), share(range(2, 4), [None, (2, 2)])]
    assert joined(halves, share(range(4), [])) == [None, None]
