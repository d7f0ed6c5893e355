"""What is known of the copies on their way into blocks: a table that reads as a mapping."""

from __future__ import annotations

import numpy as np
import pytest

from canary_obs.copy_records.stored_copies import MOST
from canary_obs.engines.vllm import sent_copies
from canary_obs.engines.vllm.sent_copies import Copies, SentCopies


def test_what_was_taken_is_known_no_more() -> None:
    copies = Copies()
    copies.put("full", [7, 3], [4, 2], [[(1, -1)], [(2, -2)]], "one@host")
    assert copies == {
        ("full", 3): SentCopies(2, ((2, -2),), "one@host"),
        ("full", 7): SentCopies(4, ((1, -1),), "one@host"),
    }
    taken = copies.take("full", np.array([7, 5]))
    assert (taken.filled.tolist(), taken.counts.tolist(), taken.peer) == ([4, 0], [1, 0], "")
    assert taken.folds[0, 0].tolist() == [1, -1]
    assert set(copies) == {("full", 3)}
    assert copies.take("full", np.array([7])).counts.tolist() == [0]
    assert copies.take("swa", np.array([3])).counts.tolist() == [0], "another group's"


def test_a_block_may_have_several_copies_or_none() -> None:
    copies = Copies()
    several = [(number, -number) for number in range(MOST)]
    copies.put("full", [1, 2, 3, 4], 16, [several[:2], [], several, [*several, (9, 9)]])
    taken = copies.take("full", np.arange(1, 5))
    assert taken.counts.tolist() == [2, 0, MOST, 0]
    assert taken.folds[2].tolist() == [list(fold) for fold in several]
    assert taken.filled.tolist() == [16] * 4


def test_what_is_known_stays_when_a_higher_block_is_put() -> None:
    copies = Copies()
    copies.put("full", [1], 16, [[(5, 6)]])
    copies.put("full", [1 << 17], 16, [[(7, 8)]])
    assert len(copies) == 2
    assert copies["full", 1].folds == ((5, 6),)


def test_several_peers_are_none() -> None:
    copies = Copies()
    copies.put("full", [1], 16, [[(5, 6)]], "one@host")
    copies.put("full", [2], 16, [[(5, 6)]], "two@host")
    assert copies["full", 2].peer == "two@host"
    assert copies.take("full", np.array([1, 2])).peer == ""


def test_peers_that_have_nothing_on_its_way_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sent_copies, "_PEERS", 4)
    copies = Copies()
    copies.put("full", [1], 16, [[(5, 6)]], "stays")
    for number in range(20):
        copies.put("full", [2], 16, [[(5, 6)]], f"peer {number}")
        assert copies["full", 2].peer == f"peer {number}"
        assert copies["full", 1].peer == "stays"
        assert len(copies._peers) <= 4
