"""When the records of a transfer are read and written; on a CPU nothing is under way."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from canary_obs.engines.sglang.transfer_order import StreamOrder, TransferOrder, forward_of


class Checks:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def in_order(self) -> Any:
        self.calls.append("in order")
        return nullcontext()

    def precede(self) -> None:
        self.calls.append("precede")

    def record(self, side: torch.Event, line: torch.Event) -> None:
        raise AssertionError("there are no events on a CPU")


def ordered() -> tuple[Checks, StreamOrder]:
    checks = Checks()
    return checks, StreamOrder(checks, torch.device("cpu"))


def run(order: TransferOrder, *requests: Any) -> None:
    order.ran(SimpleNamespace(reqs=list(requests)))


def test_a_chunk_is_sent_after_the_forward_that_wrote_it() -> None:
    """While the next one runs, which wrote more of the same prompt."""
    _, order = ordered()
    asked = SimpleNamespace(extend_end=4, origin_input_ids=[0] * 10)
    assert forward_of(asked, 4) is None
    for end in (4, 8, 10):
        asked.extend_end = end
        run(order, asked)
    chosen = [forward_of(asked, tokens) for tokens in (4, 8, 9, 10)]
    assert [each.tokens for each in chosen if each] == [8, 8, 10, 10], "of the last two"
    assert forward_of(asked, 11) is None


def test_a_prompt_that_is_computed_anew_is_sent_after_its_new_forwards() -> None:
    _, order = ordered()
    asked = SimpleNamespace(extend_end=8, origin_input_ids=[0] * 10)
    run(order, asked)
    asked.extend_end = 4
    run(order, asked)
    assert forward_of(asked, 8) is None, "not by the forward before"
    chosen = forward_of(asked, 4)
    assert chosen is not None
    assert chosen.tokens == 4


def test_decoded_tokens_are_not_sent() -> None:
    _, order = ordered()
    asked = SimpleNamespace(extend_end=12, origin_input_ids=[0] * 10)
    run(order, asked)
    chosen = forward_of(asked, 10)
    assert chosen is not None
    assert chosen.tokens == 10


@pytest.mark.parametrize("streams", [False, True])
def test_what_arrives_follows_the_checks(streams: bool) -> None:
    checks, order = ordered() if streams else (Checks(), TransferOrder())
    with order.receiving(torch.zeros(2)):
        pass
    order.precede()
    with order.sending(SimpleNamespace(), 2) as settle:
        settle()
    assert checks.calls == (["in order", "precede"] if streams else [])
    assert order.compares_overwritten is not streams


@pytest.mark.parametrize("streams", [False, True])
def test_what_has_arrived_is_read_without_the_checks(streams: bool) -> None:
    checks, order = ordered() if streams else (Checks(), TransferOrder())
    asked = SimpleNamespace()
    order.expect(asked)
    with order.arrived(asked):
        pass
    assert checks.calls == []
