"""What is known of the copies on their way into blocks."""

from __future__ import annotations

import numpy as np
import pytest

from canary_obs.copy_records.stored_copies import MOST
from canary_obs.engines.vllm import sent_copies
from canary_obs.engines.vllm.sent_copies import Copies
from tests.engines.vllm.taken_copies import Taken, taken


def test_what_was_taken_is_known_no_more() -> None:
    copies = Copies()
    copies.put("full", [7, 3], [4, 2], [[(1, -1)], [(2, -2)]], "one@host")
    found = copies.take("full", np.array([7, 5]))
    assert (found.filled.tolist(), found.counts.tolist(), found.peer) == ([4, 0], [1, 0], "")
    assert found.folds[0, 0].tolist() == [1, -1]
    assert taken(copies) == {("full", 3): Taken(2, ((2, -2),), "one@host")}
    assert taken(copies) == {}


def test_what_is_forgotten_is_known_no_more() -> None:
    """Whatever was taken, forgotten or put twice before."""
    copies, generator = Copies(), np.random.default_rng(1)
    known = set[int]()
    for _ in range(300):
        blocks = generator.choice(12, generator.integers(1, 5), replace=False)
        match generator.integers(3):
            case 0:
                copies.put("full", blocks.tolist(), 16, [[(1, 2)]] * blocks.size)
                known.update(blocks.tolist())
            case 1:
                found = copies.take("full", blocks)
                assert (found.counts > 0).tolist() == [block in known for block in blocks.tolist()]
                known.difference_update(blocks.tolist())
            case _:
                copies.forget("full", blocks.tolist())
                known.difference_update(blocks.tolist())
        assert copies._said.get("full", 0) == len(known)
    copies.forget("full", range(12))
    assert taken(copies) == {}


def test_a_block_that_is_named_twice_is_known_until_it_is_taken() -> None:
    copies = Copies()
    copies.put("full", [5, 6], 16, [[(1, 2)]] * 2)
    copies.take("full", np.array([6, 6]))
    copies.forget("full", [5, 5])
    assert taken(copies) == {}
    copies.put("full", [5, 5], 16, [[(1, 2)]] * 2)
    copies.put("full", [5, 5, 6], 16, [[(1, 2)]] * 3)
    copies.forget("full", [6, 6])
    copies.forget("full", [5])
    assert taken(copies) == {}


def test_a_block_may_have_several_copies_or_none() -> None:
    copies = Copies()
    several = [(number, -number) for number in range(MOST)]
    copies.put("full", [1, 2, 3, 4], 16, [several[:2], [], several, [*several, (9, 9)]])
    found = copies.take("full", np.arange(1, 5))
    assert found.counts.tolist() == [2, 0, MOST, 0]
    assert found.folds[2].tolist() == [list(fold) for fold in several]
    assert found.filled.tolist() == [16] * 4


def test_what_is_known_stays_when_a_higher_block_is_put() -> None:
    copies = Copies()
    copies.put("full", [1], 16, [[(5, 6)]])
    copies.put("full", [1 << 17], 16, [[(7, 8)]])
    assert copies.take("full", np.array([1, 1 << 17])).folds[:, 0].tolist() == [[5, 6], [7, 8]]


def test_several_peers_are_none() -> None:
    copies = Copies()
    copies.put("full", [1], 16, [[(5, 6)]], "one@host")
    copies.put("full", [2], 16, [[(5, 6)]], "two@host")
    copies.put("full", [3], 16, [[(5, 6)]], "two@host")
    assert copies.take("full", np.array([1, 2])).peer == ""
    assert copies.take("full", np.array([3])).peer == "two@host"


def test_peers_that_have_nothing_on_its_way_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sent_copies, "_PEERS", 4)
    copies = Copies()
    copies.put("full", [1], 16, [[(5, 6)]], "stays")
    for number in range(20):
        copies.put("full", [2], 16, [[(5, 6)]], f"peer {number}")
        assert len(copies._peers) <= 4
        assert copies.take("full", np.array([2])).peer == f"peer {number}"
        copies.put("full", [2], 16, [[(5, 6)]], f"peer {number}")
    assert copies.take("full", np.array([1])).peer == "stays"
