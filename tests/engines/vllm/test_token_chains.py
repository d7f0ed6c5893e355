"""What the scheduler's side says of its requests' tokens, without a vLLM; against the oracle's chain."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from canary_obs.engines.vllm.token_chains import TOKENS_ATTRIBUTE, TokenChains, send_tokens
from tests.oracles import records as oracle


def request(tokens: list[int], computed: int, embeds: Any = None) -> Any:
    return SimpleNamespace(
        all_token_ids=tokens, num_tokens=len(tokens), num_computed_tokens=computed, prompt_embeds=embeds
    )


def told(chains: TokenChains, requests: dict[str, Any]) -> list[tuple[int, int]]:
    lens, digests = chains.advance(requests, dict.fromkeys(requests, 1))
    return list(zip(lens.tolist(), digests.tolist(), strict=True))


def expected(tokens: list[int], known: int) -> tuple[int, int]:
    return known, oracle.signed(oracle.digest_of(tokens[:known]))


@settings(deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 30), st.integers(0, 30)), max_size=3),
        max_size=8,
    )
)
def test_chains_are_those_of_the_tokens_known(steps: list[list[tuple[str, int, int]]]) -> None:
    """In any order: chunks, preemptions (computed tokens fall back), drafts (more computed than known)."""
    chains = TokenChains()
    tokens = {name: [7 * number + ord(name) for number in range(30)] for name in "abc"}
    for step in steps:
        requests = {name: request(tokens[name][:length], computed) for name, length, computed in step}
        assert told(chains, requests) == [
            expected(tokens[name], min(found.num_tokens, found.num_computed_tokens))
            for name, found in requests.items()
        ]


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["on", "other", "end", "again", "lag"]), st.integers(1, 3)), max_size=12
    )
)
def test_chains_of_decoding_requests(steps: list[tuple[str, int]]) -> None:
    """Requests go on by a token each; one may leave the batch, end, fall back or wait."""
    chains, tokens = TokenChains(), {name: [ord(name)] * 40 for name in "ab"}
    computed = dict.fromkeys("ab", 5)
    for number, (event, repeats) in enumerate(steps):
        for _ in range(repeats):
            batch = "b" if event == "other" else "ab"
            if event == "end":
                chains.forget({"a"})
                tokens["a"], computed["a"] = [number] * 40, 0
            for name in batch:
                computed[name] = computed[name] - 2 if event == "again" else computed[name] + (event != "lag")
                computed[name] = min(max(computed[name], 1), 40)
            assert told(chains, {name: request(tokens[name], computed[name]) for name in batch}) == [
                expected(tokens[name], computed[name]) for name in batch
            ]


def test_requests_whose_newest_tokens_are_not_known_yet() -> None:
    """As with asynchronous scheduling: more is computed than known, then one token comes, none, or two."""
    chains, lengths = TokenChains(), {"a": 4, "b": 7}
    tokens = {name: [3 * place + ord(name) for place in range(40)] for name in lengths}
    for added in ((1, 1), (1, 1), (0, 1), (1, 1), (1, 1), (2, 1), (1, 1), (1, 1)):
        for name, more in zip(lengths, added, strict=True):
            lengths[name] += more
        requests = {name: request(tokens[name][:known], known + 1) for name, known in lengths.items()}
        assert told(chains, requests) == [expected(tokens[name], known) for name, known in lengths.items()]


def test_another_request_that_is_as_far_is_not_taken_for_the_one_before() -> None:
    chains = TokenChains()
    tokens = {"a": [1] * 9, "b": [2] * 9}
    for name in "ab":
        told(chains, {name: request(tokens[name], 4)})
    assert told(chains, {"a": request(tokens["a"], 5)}) == [expected(tokens["a"], 5)]
    assert told(chains, {"b": request(tokens["b"], 6)}) == [expected(tokens["b"], 6)]


def test_a_request_that_ended_may_come_back_with_other_tokens() -> None:
    chains = TokenChains()
    told(chains, {"a": request([1, 2, 3], 3)})
    chains.forget({"a"})
    assert told(chains, {"a": request([4, 5, 6, 7], 4)}) == [expected([4, 5, 6, 7], 4)]
    chains.forget({"a", "b"})
    assert chains._known == {}


def test_nothing_is_known_of_a_prompt_without_tokens() -> None:
    chains = TokenChains()
    for computed in (3, 4):
        ((known, _), other) = told(
            chains, {"a": request([0, 0, 0, 9], computed, embeds=object()), "b": request([5], 1)}
        )
        assert known == -1
        assert other == expected([5], 1)


def test_an_output_without_requests_and_one_that_fails() -> None:
    scheduler = SimpleNamespace(requests={})
    output = SimpleNamespace(num_scheduled_tokens={}, finished_req_ids=set())
    send_tokens(scheduler, output)
    assert getattr(output, TOKENS_ATTRIBUTE).shape == (2, 0)
    failing = SimpleNamespace(num_scheduled_tokens={"unknown": 1}, finished_req_ids=set())
    with pytest.raises(KeyError):
        send_tokens(scheduler, failing)
    assert not hasattr(failing, TOKENS_ATTRIBUTE)
    scheduler.requests["a"] = request([3], 1)
    again = SimpleNamespace(num_scheduled_tokens={"a": 1}, finished_req_ids=set())
    send_tokens(scheduler, again)
    np.testing.assert_array_equal(getattr(again, TOKENS_ATTRIBUTE)[:, 0], expected([3], 1))


def test_a_preempted_request_that_knows_the_next_token_is_computed_anew() -> None:
    """Its batch would go on with that token, were what it has computed not fewer."""
    chains, tokens = TokenChains(), list(range(20, 40))
    for computed in (5, 6, 3):
        found = {"a": request(tokens[:7], computed)}
        assert told(chains, found) == [expected(tokens, computed)]
