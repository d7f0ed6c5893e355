"""Two requests' next tokens are exchanged where a forward adds two different ones; what becomes of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from canary_obs.engine_api.views import GroupStep, GroupTokens, StepView
from canary_obs.runtime.perturb.injection import Injection, Outcome
from canary_obs.runtime.perturb.injection_log import InjectionLog
from canary_obs.runtime.perturb.target import Target
from canary_obs.runtime.perturb.token_swaps import TokenSwaps
from canary_obs.vocabulary import PerturbMode
from tests.runtime.conftest import MakeRig

# Three requests with 3, 5 and 0 tokens before; the last one is a prefill.
SLOTS = [[10, 11, 12, 13, 0, 0], [20, 21, 22, 23, 24, 25], [30, 31, 0, 0, 0, 0]]


def forward(ids: list[int], *, extend: tuple[int, ...] = (1, 1, 2), prefix: tuple[int, ...] = (3, 5, 0)):
    starts = [0, *torch.tensor(extend).cumsum(0).tolist()]
    places = [
        (row, at) for row in range(3) for at in range(prefix[row], prefix[row] + extend[row])
    ]  # row and position of each token
    column = torch.tensor
    return StepView(
        request_ids=("a", "b", "c"), rows=column([0, 1, 2]), prefix_lens=column(prefix),
        extend_lens=column(extend), token_starts=column(starts), input_ids=column(ids),
        positions=column([at for _, at in places]), digests=None,
        groups={
            "full": GroupStep(
                slot_table=column(SLOTS), out_slots=column([SLOTS[row][at] for row, at in places])
            )
        },
    )  # fmt: skip


class Swaps:
    """A TokenSwaps with a group of a real canary and a log of its own."""

    def __init__(self, make_rig: MakeRig) -> None:
        self.group = make_rig().canary.state.by_name["full"]
        self.log = InjectionLog((PerturbMode.NEXT_TOKEN_SWAP,))
        self.swaps = TokenSwaps(Target(self.group, 5, self.log))

    def made(self) -> Injection:
        """One swap, whose forward has ended."""
        assert self.swaps.swap(forward([7, 9, 1, 2]), 4) is None
        self.group.buffers.records[[13, 25]] = torch.arange(1, 9, dtype=torch.int64).view(2, 4)
        self.swaps.written()
        (injection,) = self.log.open
        return injection

    def rewrite(self, *slots: int) -> None:
        self.group.buffers.records[list(slots)] = 99


@pytest.fixture
def swaps(make_rig: MakeRig) -> Swaps:
    return Swaps(make_rig)


def test_two_different_tokens_are_exchanged_and_nothing_else(swaps: Swaps) -> None:
    view = forward([7, 9, 1, 2])
    assert swaps.swaps.swap(view, 4) is None
    assert view.input_ids.tolist() == [9, 7, 1, 2]
    (injection,) = swaps.log.open
    assert {(injection.slot, injection.position), (13, 3), (25, 5)} == {(13, 3), (25, 5)}
    assert injection.also == {("full", 13), ("full", 25)}
    assert injection.following == {4, 6}
    assert (injection.mode, injection.group, injection.step) == (PerturbMode.NEXT_TOKEN_SWAP, "full", 4)
    assert "slot=" in injection.detail
    assert not {"7", "9"} & set(injection.detail.replace(",", " ").split("=")), "token ids are private"


def with_own_tokens(view: StepView) -> StepView:
    tokens = GroupTokens(
        prefix_lens=view.prefix_lens, extend_lens=view.extend_lens, token_starts=view.token_starts,
        input_ids=view.input_ids.clone(), positions=view.positions, digests=None,
    )  # fmt: skip
    return replace(view, groups={"full": replace(view.groups["full"], tokens=tokens)})


@pytest.mark.parametrize(
    ("view", "why"),
    [
        (forward([7, 7, 1, 2]), "all requests that add one token add the same"),
        (forward([7, 8, 9, 1, 2], extend=(1, 2, 2), prefix=(3, 4, 0)), "fewer than two requests add one"),
        (forward([7, 9, 1], extend=(1, 1, 1), prefix=(0, 5, 0)), "fewer than two requests add one"),
        (replace(forward([7, 9, 1, 2]), rows=torch.tensor([0, -1, 2])), "fewer than two requests add one"),
        (with_own_tokens(forward([7, 9, 1, 2])), "the group's entries are not the tokens of the forward"),
    ],
)
def test_why_nothing_is_exchanged(swaps: Swaps, view: StepView, why: str) -> None:
    before = view.input_ids.tolist()
    assert (swaps.swaps.swap(view, 4) or "").startswith(why)
    assert (view.input_ids.tolist(), swaps.log.open) == (before, ())


def test_a_slot_with_an_injection_is_left_alone(swaps: Swaps) -> None:
    swaps.log.add(Injection(mode=PerturbMode.NEXT_TOKEN_SWAP, group="full", slot=25, step=1, time_ns=0))
    view = forward([7, 9, 1, 2])
    assert swaps.swaps.swap(view, 4) == "a slot that the forward writes holds an injection already"
    assert view.input_ids.tolist() == [7, 9, 1, 2]


@pytest.mark.parametrize("read", [False, True])
def test_rewritten_slots_end_it_as_masked_unless_they_were_read(swaps: Swaps, read: bool) -> None:
    injection = swaps.made()
    # Request b goes on only if `read`: its prefix then has the token that was written at position 5.
    swaps.swaps.follow(forward([1, 2, 3, 4], prefix=(3, 5 + read, 0), extend=(1, 0, 2)))
    swaps.swaps.settle()
    swaps.rewrite(13)
    swaps.swaps.settle()
    assert injection.outcome is Outcome.OPEN
    swaps.rewrite(25)
    swaps.swaps.settle()
    assert injection.outcome is (Outcome.MISSED if read else Outcome.MASKED)
    assert injection.why


def test_what_another_request_wrote_over_it_and_reads_is_no_read_of_it(swaps: Swaps) -> None:
    """On a GPU several forwards can pass before everything up to one of them is known."""
    injection = swaps.made()
    swaps.rewrite(13, 25)
    swaps.swaps.follow(forward([1, 2, 3, 4], prefix=(4, 6, 0), extend=(1, 0, 2)))
    swaps.swaps.settle()
    assert injection.outcome is Outcome.MASKED


def test_the_one_of_two_that_is_still_there_counts_as_read(swaps: Swaps) -> None:
    injection = swaps.made()
    swaps.rewrite(13)
    swaps.swaps.follow(forward([1, 2, 3, 4], prefix=(3, 6, 0), extend=(1, 0, 2)))
    swaps.rewrite(25)
    swaps.swaps.settle()
    assert injection.outcome is Outcome.MISSED


@pytest.mark.parametrize("read", [False, True])
def test_what_is_open_at_the_end_is_masked_only_if_nothing_read_it(swaps: Swaps, read: bool) -> None:
    injection = swaps.made()
    swaps.swaps.follow(forward([1, 2, 3, 4], prefix=(3, 5 + read, 0), extend=(1, 0, 2)))
    swaps.swaps.finish()
    assert injection.outcome is (Outcome.OPEN if read else Outcome.MASKED)


def test_a_forward_that_failed_ends_it(swaps: Swaps) -> None:
    assert swaps.swaps.swap(forward([7, 9, 1, 2]), 4) is None
    (injection,) = swaps.log.open
    swaps.swaps.abandon()
    assert (injection.outcome, injection.why) == (Outcome.MASKED, "the forward failed")


def test_a_forward_that_ended_is_not_abandoned(swaps: Swaps) -> None:
    injection = swaps.made()
    swaps.swaps.abandon()
    assert injection.outcome is Outcome.OPEN
