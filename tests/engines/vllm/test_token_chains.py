"""What the scheduler's side says of its requests' tokens, without a vLLM; against the oracle's chain."""

from __future__ import annotations

import pickle
import struct
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from canary_obs.engines.toolkit.later import Later
from canary_obs.engines.vllm import token_chains
from canary_obs.engines.vllm.token_chains import TOKENS_ATTRIBUTE, TokenChains, send_tokens
from tests.oracles import records as oracle


def request(tokens: list[int], computed: int, embeds: Any = None) -> Any:
    return SimpleNamespace(
        all_token_ids=tokens, num_tokens=len(tokens), num_computed_tokens=computed, prompt_embeds=embeds
    )


class Running:
    """A request as vLLM keeps it: the same object and the same list in every step."""

    prompt_embeds = None

    def __init__(self, tokens: list[int], computed: int) -> None:
        self.all_token_ids = tokens
        self.num_computed_tokens = computed

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    def expected(self) -> tuple[int, int]:
        return expected(self.all_token_ids, min(self.num_tokens, self.num_computed_tokens))


def told(chains: TokenChains, requests: dict[str, Any]) -> list[tuple[int, int]]:
    """Of requests that this step has added one computed token to each, or one of them more or less."""
    computed = [found.num_computed_tokens - 1 for found in requests.values()]
    return pairs(chains.advance(requests, dict.fromkeys(requests, 1), computed))


def pairs(sent: Any) -> list[tuple[int, int]]:
    return list(zip(*sent.tolist(), strict=True))


def expected(tokens: list[int], known: int) -> tuple[int, int]:
    return known, oracle.signed(oracle.digest_of(tokens[:known]))


def packed(tokens: list[int]) -> Later[bytes]:
    return Later(lambda: np.array(tokens, dtype=np.int32).tobytes())


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


def test_another_request_of_the_same_name_is_computed_anew() -> None:
    chains = TokenChains()
    assert told(chains, {"a": request([5] * 13, 12)}) == [expected([5] * 13, 12)]
    assert told(chains, {"a": request([6] * 13, 13)}) == [expected([5] * 12 + [6], 13)]
    assert told(chains, {"a": request([], 14)}) == [expected([], 0)]


@given(
    st.lists(
        st.tuples(st.sampled_from(["on", "other", "end", "again", "lag"]), st.integers(1, 3)), max_size=12
    )
)
def test_chains_of_decoding_requests(steps: list[tuple[str, int]]) -> None:
    """Requests go on by a token each; one may leave the batch, end, fall back or wait."""
    chains, requests = TokenChains(), {name: Running([ord(name)] * 40, 5) for name in "ab"}
    for number, (event, repeats) in enumerate(steps):
        for _ in range(repeats):
            batch = "b" if event == "other" else "ab"
            if event == "end":
                chains.forget({"a"})
                requests["a"] = Running([number] * 40, 0)
            for name in batch:
                found = requests[name]
                found.num_computed_tokens += -2 if event == "again" else event != "lag"
                found.num_computed_tokens = min(max(found.num_computed_tokens, 1), 40)
            scheduled = {name: requests[name] for name in batch}
            assert told(chains, scheduled) == [found.expected() for found in scheduled.values()]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=12), st.integers(0, 2))
def test_requests_whose_newest_tokens_are_not_known_yet(added: list[tuple[int, int]], ahead: int) -> None:
    """As with asynchronous scheduling: more is computed than known, then one token comes, none, or two."""
    chains = TokenChains()
    requests = {name: Running([ord(name)] * 4, 4 + ahead) for name in "ab"}
    for number, counts in enumerate([(1, 1), (1, 1), *added]):
        for found, count in zip(requests.values(), counts, strict=True):
            found.all_token_ids += range(number, number + count)
            found.num_computed_tokens += 1
        assert told(chains, requests) == [found.expected() for found in requests.values()]


class Unread(dict[str, Any]):
    """Requests that are told apart, and not looked into."""

    def __getitem__(self, name: str) -> Any:
        raise AssertionError(f"request {name} was looked at")


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_step_in_which_all_went_on_looks_at_their_new_tokens_alone(ahead: int) -> None:
    chains, requests = TokenChains(), {name: Running([ord(name)] * 4, 4 + ahead) for name in "ab"}
    told(chains, requests)
    sent = []
    for number in range(3):
        for found in requests.values():
            found.all_token_ids.append(number)
            found.num_computed_tokens += 1
        computed = [found.num_computed_tokens - 1 for found in requests.values()]
        sent.append(chains.advance(Unread(requests), dict.fromkeys("ab", 1), computed))
    wanted = [[expected([ord(name)] * 4 + [*range(more)], 4 + more) for name in "ab"] for more in (1, 2, 3)]
    assert [pairs(each) for each in sent] == wanted, "and what was sent stays as it was"


def test_a_token_that_is_none_costs_its_step_alone() -> None:
    chains, tokens = TokenChains(), [5, 6, 7]
    found = {"a": Running(tokens, 3)}
    told(chains, found)
    for newest in (8, "none"):
        tokens.append(newest)  # type: ignore[arg-type]
        found["a"].num_computed_tokens += 1
        if newest == 8:
            told(chains, found)
    with pytest.raises(struct.error):
        told(chains, found)
    tokens[-1:] = [9, 10]  # what is known by now goes beyond the forward
    assert told(chains, found) == [found["a"].expected()]


def test_a_list_of_tokens_that_is_replaced_is_noticed() -> None:
    chains, found = TokenChains(), {"a": Running([5, 6, 7], 3)}
    for newest in (8, 9, 10):
        told(chains, found)
        found["a"].all_token_ids = [*found["a"].all_token_ids, newest]
        found["a"].num_computed_tokens += 1
        assert told(chains, found) == [found["a"].expected()]


def test_another_request_that_is_as_far_is_not_taken_for_the_one_before() -> None:
    chains = TokenChains()
    requests = {"a": Running([1] * 9, 0), "b": Running([2] * 9, 0)}
    for name, computed in (("a", 4), ("a", 5), ("b", 6), ("b", 7), ("a", 8)):
        requests[name].num_computed_tokens = computed
        sent = chains.advance(requests, {name: 1}, [computed - 1])  # the other one waits
        assert pairs(sent) == [requests[name].expected()]


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


def output_of(names: tuple[str, ...], computed: list[int], tokens: int = 1) -> Any:
    return SimpleNamespace(
        num_scheduled_tokens=dict.fromkeys(names, tokens), total_num_scheduled_tokens=tokens * len(names),
        scheduled_cached_reqs=SimpleNamespace(req_ids=[*names], num_computed_tokens=computed),
        finished_req_ids=set(),
    )  # fmt: skip


def test_an_output_without_requests_and_one_that_fails() -> None:
    scheduler = SimpleNamespace(requests={})
    output = output_of((), [])
    send_tokens(scheduler, output)
    assert getattr(output, TOKENS_ATTRIBUTE).shape == (2, 0)
    failing = output_of(("unknown",), [0])
    with pytest.raises(KeyError):
        send_tokens(scheduler, failing)
    assert not hasattr(failing, TOKENS_ATTRIBUTE)
    scheduler.requests["a"] = request([3], 1)
    again = output_of(("a",), [0])
    send_tokens(scheduler, again)
    np.testing.assert_array_equal(getattr(again, TOKENS_ATTRIBUTE)[:, 0], expected([3], 1))


@pytest.mark.parametrize("change", ["tokens", "order", "ended"])
def test_an_output_that_does_not_go_on_by_one_token_of_each(change: str) -> None:
    """Though what was computed before is what it would be if it did."""
    requests = {name: Running([ord(name) + place for place in range(9)], 0) for name in "ab"}
    scheduler = SimpleNamespace(requests=requests)
    computed = {"a": 2, "b": 3}
    for number in range(3):
        last = number == 2
        output = output_of(("a", "b"), [*computed.values()], 2 if last and change == "tokens" else 1)
        if last and change == "order":
            computed = {"a": 5, "b": 4}
            output.scheduled_cached_reqs.req_ids.reverse()
        if last and change == "ended":
            output.finished_req_ids = {"a"}
            requests["a"] = Running([5] * 9, 0)
        computed = {name: count + output.num_scheduled_tokens[name] for name, count in computed.items()}
        for name, count in computed.items():
            requests[name].num_computed_tokens = count
        send_tokens(scheduler, output)
        assert pairs(getattr(output, TOKENS_ATTRIBUTE)) == [found.expected() for found in requests.values()]


def test_a_preempted_request_that_knows_the_next_token_is_computed_anew() -> None:
    """Its batch would go on with that token, were what it has computed not fewer."""
    chains, found = TokenChains(), Running(list(range(20, 27)), 0)
    for found.num_computed_tokens in (5, 6, 3):
        assert told(chains, {"a": found}) == [found.expected()]


@pytest.mark.parametrize("in_between", [0, 1, 2])
def test_the_chain_of_loaded_tokens_is_computed_while_they_are_on_their_way(in_between: int) -> None:
    chains, loading = TokenChains(), [7 * number for number in range(40)]
    chains.expect("a", packed(loading[:32]))
    assert told(chains, {"b": request([1, 2, 3], 2)}) == [expected([1, 2, 3], 2)]
    assert "a" not in chains._known, "it would hold up the load"
    for _ in range(in_between):
        told(chains, {})
    assert ("a" in chains._known) == (in_between > 0)
    assert told(chains, {"a": request(loading, 36)}) == [expected(loading, 36)]
    assert (chains._announced, chains._due) == ({}, {})


def test_loaded_tokens_that_could_not_be_read_are_chained_when_the_request_is_scheduled() -> None:
    chains, loading = TokenChains(), [7 * number for number in range(40)]
    chains.expect("a", Later(lambda: None))
    told(chains, {})
    told(chains, {})
    assert "a" not in chains._known
    assert told(chains, {"a": request(loading, 36)}) == [expected(loading, 36)]


def test_an_output_without_tokens_costs_no_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    chains, found = TokenChains(), request([1, 2, 3], 2)
    assert told(chains, {"a": found}) == [expected([1, 2, 3], 2)]
    with monkeypatch.context() as patched:
        patched.delattr(token_chains, "added_chains")
        assert chains.advance({"a": found}, {}).shape == (2, 0)
    assert told(chains, {"a": found}) == [expected([1, 2, 3], 2)]


@pytest.mark.parametrize("how", ["with its load", "computed again", "ended", "ended a step later"])
def test_what_was_said_of_a_load_is_not_believed_later(how: str) -> None:
    chains, tokens = TokenChains(), list(range(100, 140))
    chains.expect("a", packed(tokens[:32]))
    if how == "with its load":
        told(chains, {"a": request(tokens, 33)})
    elif how == "ended a step later":
        told(chains, {})
    if how.startswith("ended"):
        chains.forget({"a"})
        tokens = list(range(40))
    told(chains, {})
    told(chains, {})
    known = {"with its load": 33, "computed again": 32}.get(how)
    assert {name: count for name, (count, _) in chains._known.items()} == ({"a": known} if known else {})
    computed = 8 if how == "computed again" else 40
    assert told(chains, {"a": request(tokens, computed)}) == [expected(tokens, computed)]


def prompts_sent(monkeypatch: pytest.MonkeyPatch, requests: dict[str, Running]) -> tuple[Any, list[int], Any]:
    """An output that computes 40 tokens of each; how many tokens were read so far; and its scheduler."""
    scheduler, read, tokens_of = SimpleNamespace(requests=requests), list[int](), token_chains.token_array

    def token_array(ids: Any) -> Any:
        read.append(len(ids))
        return tokens_of(ids)

    monkeypatch.setattr(token_chains, "token_array", token_array)
    output = output_of(tuple(requests), [0] * len(requests), 40)
    send_tokens(scheduler, output)
    return output, read, scheduler


def prompt(first: int) -> Running:
    return Running(list(range(first, first + 60)), 40)


def test_chains_of_prompts_are_computed_when_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = {"a": prompt(5), "b": prompt(9)}
    output, read, scheduler = prompts_sent(monkeypatch, requests)
    (sent, wanted) = output.__dict__[TOKENS_ATTRIBUTE], [one.expected() for one in requests.values()]
    assert read == []
    for one in requests.values():
        one.num_computed_tokens = 60  # by the next output
    assert pairs(sent.get()) == wanted
    assert sent.get() is sent.get()
    assert read == [80]
    following = output_of(("a", "b"), [40, 40], 20)
    send_tokens(scheduler, following)
    assert pairs(following.__dict__[TOKENS_ATTRIBUTE].get()) == [one.expected() for one in requests.values()]
    assert read == [80, 40]


@pytest.mark.parametrize("by", ["an output", "an end", "a load", "a copy for another process"])
def test_chains_of_prompts_are_computed_before_what_follows(monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    requests = {"a": prompt(5), "b": prompt(9)}
    output, read, scheduler = prompts_sent(monkeypatch, requests)
    (sent, wanted) = output.__dict__[TOKENS_ATTRIBUTE], [one.expected() for one in requests.values()]
    chains = token_chains.chains_of(scheduler)
    if by == "an output":
        for one in requests.values():
            one.num_computed_tokens = 41
        send_tokens(scheduler, output_of(("a", "b"), [40, 40], 1))
    elif by == "an end":
        chains.forget({"a"})
        requests["a"] = prompt(70)
    elif by == "a load":
        chains.expect("c", packed([0, 1, 2]))
        chains.advance({}, {})
    else:
        arrived = pickle.loads(pickle.dumps(sent))
        assert pairs(arrived) == wanted
    assert read[:1] == [80]
    assert pairs(sent.get()) == wanted
    assert sum(read) == 80, "nothing is computed twice"


def test_chains_of_prompts_that_fail_are_unknown_and_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    requests = {"a": prompt(5)}
    requests["a"].all_token_ids[7] = "seven"  # type: ignore[call-overload]
    output, _, scheduler = prompts_sent(monkeypatch, requests)
    assert output.__dict__[TOKENS_ATTRIBUTE].get() is None
    assert "send_tokens" in caplog.text
    requests["a"].all_token_ids[7] = 7
    again = output_of(("a",), [0], 40)
    send_tokens(scheduler, again)
    assert pairs(again.__dict__[TOKENS_ATTRIBUTE].get()) == [requests["a"].expected()]
