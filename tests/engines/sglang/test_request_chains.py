"""Chains over token lists that grow, start again, and whose newest token is late."""

from __future__ import annotations

import random
from array import array

import numpy as np
import pytest

from canary_kernels.hashing import mix_arrays
from canary_kernels.layout import CHAIN_ANCHOR, signed
from canary_obs.engines.sglang.request_chains import RequestChains


class Request:
    """What SGLang keeps of a request."""

    def __init__(self, rid: str, prompt: list[int], output: list[int]) -> None:
        self.rid, self.origin_input_ids, self.output_ids = rid, array("q", prompt), output

    @property
    def tokens(self) -> list[int]:
        return [*self.origin_input_ids, *self.output_ids]


def chain(tokens: list[int]) -> int:
    """Not by the code under test: of all tokens at once."""
    mixed = mix_arrays(np.array(tokens, dtype=np.int64), np.arange(len(tokens)))
    return signed((CHAIN_ANCHOR + int(mixed.sum(dtype=np.uint64))) & ((1 << 64) - 1))


def longs(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def test_a_prefill_in_chunks_and_what_is_decoded_after_it() -> None:
    chains, request = RequestChains(), Request("a", [5, 6, 7, 8, 9], [])
    for prefix, end in ((0, 2), (2, 5)):
        found = chains.advance([request], longs(prefix), longs(end))
        assert found.digests.tolist() == [chain(request.tokens[:prefix])]
        assert (found.known_lens.tolist(), found.known_digests.tolist()) == (
            [end],
            [chain(request.tokens[:end])],
        )
    for token in (11, 12, 13):
        request.output_ids.append(token)
        count = len(request.tokens)
        found = chains.advance([request], longs(count - 1), longs(count))
        assert found.digests.tolist() == [chain(request.tokens[:-1])]
        assert found.known_digests.tolist() == [chain(request.tokens)]


def test_all_that_is_known_whatever_was_accepted() -> None:
    """Some requests get no token between two batches, others several; one starts again."""
    chains, draw, requests = RequestChains(), random.Random(3), [Request(name, [5, 6], []) for name in "abc"]
    for step in range(60):
        given = requests[: 1 + step % 3] if step % 7 == 0 else requests
        found = chains.known(given)
        assert found.known_lens.tolist() == [len(request.tokens) for request in given]
        expected = [chain(request.tokens) for request in given]
        assert found.known_digests.tolist() == found.digests.tolist() == expected
        for request in requests:
            request.output_ids += [draw.randrange(1000) for _ in range(draw.choice((0, 1, 1, 3)))]
        if step == 30:
            requests[1].output_ids.clear()


def test_the_newest_token_may_be_known_on_the_device_only() -> None:
    chains, request = RequestChains(), Request("a", [5, 6], [7])
    found = chains.advance([request], longs(3), longs(4))
    assert found.digests.tolist() == found.known_digests.tolist() == [chain([5, 6, 7])]
    assert found.known_lens.tolist() == [3]


def test_a_request_that_was_retracted_is_computed_anew() -> None:
    chains, request = RequestChains(), Request("a", [5, 6, 7], [8, 9])
    chains.advance([request], longs(4), longs(5))
    found = chains.advance([request], longs(1), longs(5))
    assert found.digests.tolist() == [chain([5])]
    assert found.known_digests.tolist() == [chain(request.tokens)]


def test_batches_in_any_order() -> None:
    draw, chains = random.Random(5), RequestChains()
    requests = [
        Request(str(n), [draw.randrange(1000) for _ in range(draw.randrange(1, 9))], []) for n in range(6)
    ]
    for _ in range(60):
        batch = draw.sample(requests, draw.randrange(1, 6))
        for request in batch:
            request.output_ids.append(draw.randrange(1000))
        ends = [len(request.tokens) for request in batch]
        prefixes = [draw.randrange(end) if draw.random() < 0.2 else end - 1 for end in ends]
        found = chains.advance(batch, longs(*prefixes), longs(*ends))
        known = [chain(request.tokens) for request in batch]
        before = [chain(r.tokens[:prefix]) for r, prefix in zip(batch, prefixes, strict=True)]
        assert (found.digests.tolist(), found.known_digests.tolist()) == (before, known)


def test_requests_are_told_apart_by_the_object_and_forgotten_with_it() -> None:
    chains = RequestChains()
    first = Request("a", [5, 6], [])
    chains.advance([first], longs(0), longs(2))
    again = Request("a", [7, 8, 9], [])
    assert chains.advance([again], longs(2), longs(3)).digests.tolist() == [chain([7, 8])]
    assert len(chains._known) == 1
    del first
    assert len(chains._known) == 0


@pytest.mark.parametrize("late", [0, 1])
def test_a_batch_that_decodes_is_not_looked_up(late: int) -> None:
    """`late`: whether the newest token is known on the device only, as in SGLang's overlap loop."""
    chains, draw = RequestChains(), random.Random(7)
    batch = [Request(str(n), [draw.randrange(1000) for _ in range(n + 1)], []) for n in range(4)]
    ends = np.array([len(request.tokens) for request in batch])
    chains.advance(batch, longs(0, 0, 0, 0), ends)
    for step in range(6):
        for request in batch[: 0 if late and step == 0 else 4]:
            request.output_ids.append(draw.randrange(1000))
        ends = np.array([len(request.tokens) + late for request in batch])
        found = chains.advance(batch, ends - 1, ends)
        assert found.digests.tolist() == [
            chain(request.tokens[: end - 1]) for request, end in zip(batch, ends, strict=True)
        ]
        assert found.known_digests.tolist() == [chain(request.tokens) for request in batch]
        assert found.known_lens.tolist() == [len(request.tokens) for request in batch]
        assert len(chains._known) == 0
    batch[2].output_ids[-1] += 1  # what the scheduler says later counts
    batch[2].output_ids.append(5)
    batch[0].output_ids += [1, 2]  # two at once: each is looked up
    ends = np.array([len(request.tokens) for request in batch])
    found = chains.advance(batch, ends, ends)
    assert found.digests.tolist()[:2] == [chain(request.tokens) for request in batch[:2]]
    assert len(chains._known) == 4


def repeating() -> tuple[RequestChains, list[Request]]:
    """Two requests whose newest tokens were sampled one by one, so that the next batch is foreseen."""
    chains, batch = RequestChains(), [Request("a", [5, 6], []), Request("b", [7], [])]
    for _ in range(4):
        for request in batch:
            request.output_ids.append(11)
        ends = np.array([len(request.tokens) for request in batch])
        chains.advance(batch, ends - 1, ends)
    assert chains._following is not None
    return chains, batch


def test_a_batch_that_repeats_but_for_its_prefixes_is_computed_anew() -> None:
    chains, batch = repeating()
    for request in batch:
        request.output_ids.append(12)
    ends = np.array([len(request.tokens) for request in batch])
    found = chains.advance(batch, ends - 3, ends)
    assert found.digests.tolist() == [chain(request.tokens[:-3]) for request in batch]
    assert found.known_digests.tolist() == [chain(request.tokens) for request in batch]


def test_a_batch_whose_answers_grow_unevenly_is_computed_anew() -> None:
    chains, batch = repeating()
    batch[0].output_ids.append(12)
    ends = np.array([len(batch[0].tokens), len(batch[1].tokens) + 1])
    found = chains.advance(batch, ends - 1, ends)
    assert found.known_lens.tolist() == [len(request.tokens) for request in batch]
    assert found.known_digests.tolist() == [chain(request.tokens) for request in batch]


def test_tokens_that_the_scheduler_does_not_have() -> None:
    with pytest.raises(
        LookupError, match=r"request a: the forward continues after 3 tokens, of which .* has 2"
    ):
        RequestChains().advance([Request("a", [5, 6], [])], longs(3), longs(4))


def following(count: int) -> tuple[RequestChains, list[Request]]:
    """`repeating`, and batches whose tokens were taken as the next ones."""
    chains, batch = repeating()
    for number in range(count):
        for place, request in enumerate(batch):
            request.output_ids.append(20 + 2 * number + place)
        tokens = chains.next_tokens(batch, [len(request.tokens) for request in batch])
        assert tokens == [20 + 2 * number, 21 + 2 * number]
    return chains, batch


@pytest.mark.parametrize("count", [1, 5, 15, 16, 17, 40])
def test_tokens_of_batches_that_follow_are_added_later(count: int) -> None:
    chains, batch = following(count)
    for request in batch:
        request.output_ids.append(12)
    ends = np.array([len(request.tokens) for request in batch])
    found = chains.advance(batch, ends - 1, ends)
    assert found.digests.tolist() == [chain(request.tokens[:-1]) for request in batch]
    assert found.known_digests.tolist() == [chain(request.tokens) for request in batch]
    batch.reverse()  # each is looked up
    found = chains.advance(batch, ends[::-1] - 2, ends[::-1])
    assert found.digests.tolist() == [chain(request.tokens[:-2]) for request in batch]


def test_a_batch_that_is_not_the_last_one_and_a_token_is_not_one_token_on() -> None:
    chains, batch = following(3)
    ends = [len(request.tokens) for request in batch]
    assert chains.next_tokens(batch, ends) is None, "no token is new"
    batch[0].output_ids.append(9)
    assert chains.next_tokens(batch, [ends[0] + 1, ends[1]]) is None, "one has none"
    batch[1].output_ids.append(9)
    later = [end + 1 for end in ends]
    assert chains.next_tokens(batch, [end + 1 for end in later]) is None, "more tokens than are known"
    assert chains.next_tokens(batch[::-1], later[::-1]) is None, "in another order"
    assert chains.next_tokens(batch[:1], later[:1]) is None, "fewer"
    assert chains.next_tokens(batch, later) == [9, 9]


def test_a_batch_that_extends_by_more_is_not_one_token_on() -> None:
    """Verified drafts: chains of theirs are advanced."""
    chains, batch = RequestChains(), [Request("a", [5, 6], [])]
    for _ in range(3):
        batch[0].output_ids.append(11)
        total = len(batch[0].tokens)
        chains.advance(batch, longs(total - 1), longs(total + 3))
    batch[0].output_ids.append(11)
    assert chains.next_tokens(batch, [total + 4]) is None
