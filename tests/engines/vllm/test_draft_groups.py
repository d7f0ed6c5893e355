from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from canary_obs.engine_api.views import GroupStep, StepTypes, StepView
from canary_obs.engines.vllm.draft_groups import DraftGroups
from canary_obs.engines.vllm.drafters import drafter_is_known

CPU = torch.device("cpu")
TYPES = StepTypes(
    slot_table=torch.int32, rows=torch.int64, lengths=torch.int32, input_ids=torch.int32,
    positions=torch.int64, out_slots=torch.int64, has_digests=True, expected_ids=None,
)  # fmt: skip


class RecordingObserver:
    """Records the calls it gets."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def invalidated(self, group: str, slots: torch.Tensor) -> None:
        self.calls.append(("invalidated", (group, slots.tolist())))

    def before_forward(self, view: StepView) -> None:
        self.calls.append(("before", view))

    def after_forward(self, view: StepView) -> None:
        self.calls.append(("after", view))

    def forward_failed(self, view: StepView) -> None:
        self.calls.append(("failed", view))


def groups() -> DraftGroups:
    runner = SimpleNamespace(
        max_num_reqs=3, max_num_tokens=8, max_model_len=12, device=CPU,
        speculative_config=SimpleNamespace(num_speculative_tokens=2),
    )  # fmt: skip
    own = SimpleNamespace(view=SimpleNamespace(name="draft", page_size=4))
    return DraftGroups(runner, [own], TYPES)


def step() -> StepView:
    """Two requests: tokens 3 and 4 of the first, 9 and 10 of the second, in pages of 4."""
    table = torch.tensor([[3, 1, 5], [2, 7, 6], [0, 0, 0]], dtype=torch.int32)
    slots = GroupStep(slot_table=table, out_slots=torch.tensor([15, 4, 25, 26]))
    return StepView(
        request_ids=["a", "b"],
        rows=torch.tensor([0, 1]),
        prefix_lens=torch.tensor([3, 9], dtype=torch.int32),
        extend_lens=torch.tensor([2, 2], dtype=torch.int32),
        token_starts=torch.tensor([0, 2, 4], dtype=torch.int32),
        input_ids=torch.tensor([50, 51, 60, 61], dtype=torch.int32),
        positions=torch.tensor([3, 4, 9, 10]),
        digests=torch.tensor([70, 71]),
        groups={"full": slots, "draft": slots},
    )


def test_the_target_runs_without_the_draft_s_groups() -> None:
    drafts, view = groups(), step()
    assert set(drafts.begin(view, RecordingObserver()).groups) == {"full"}
    assert set(view.groups) == {"full", "draft"}


def test_every_slot_that_drafting_may_write_loses_its_record() -> None:
    observer = RecordingObserver()
    groups().begin(step(), observer)
    # The first request's next positions are 5 and 6, in page 1; the second has one left, 11, in page 6.
    assert observer.calls == [("invalidated", ("draft", [15, 4, 25, 26, 5, 6, 27, 27]))]


def test_the_forward_is_reported_as_it_was_when_the_target_ran() -> None:
    drafts, view, observer = groups(), step(), RecordingObserver()
    drafts.begin(view, RecordingObserver())
    inputs = ("prefix_lens", "extend_lens", "token_starts", "input_ids", "positions")
    for name in inputs:
        getattr(view, name).fill_(-7)
    view.groups["draft"].out_slots.fill_(-7)
    assert drafts.pending
    drafts.end(observer)
    assert not drafts.pending
    (before, reported), (after, same) = observer.calls
    assert (before, after) == ("before", "after")
    assert reported is same
    expected = step()
    for name in inputs:
        assert torch.equal(getattr(reported, name), getattr(expected, name)), name
    assert list(reported.groups) == ["draft"]
    assert reported.groups["draft"].out_slots.tolist() == [15, 4, 25, 26]
    assert reported.groups["draft"].slot_table is view.groups["draft"].slot_table


def test_failed_drafting_leaves_slots_unverified() -> None:
    drafts, observer = groups(), RecordingObserver()
    drafts.begin(step(), RecordingObserver())
    drafts.fail(observer)
    ((name, failed),) = observer.calls
    assert (name, failed.groups["draft"].out_slots.tolist()) == ("failed", [15, 4, 25, 26])
    drafts.fail(observer)
    drafts.end(observer)
    assert len(observer.calls) == 1


@pytest.mark.parametrize(
    ("drafter", "parallel", "known"),
    [("EagleProposer", False, True), ("EagleProposer", True, False), ("DFlashProposer", False, False)],
)
@pytest.mark.parametrize("attribute", ["drafter", "speculator"])
def test_only_known_drafters_are_followed(attribute: str, drafter: str, parallel: bool, known: bool) -> None:
    config = SimpleNamespace(parallel_drafting=parallel)
    runner = SimpleNamespace(speculative_config=config)
    setattr(runner, attribute, type(drafter, (), {})())
    assert drafter_is_known(runner) is known


def test_without_speculation_there_is_nothing_to_follow() -> None:
    runner = SimpleNamespace(speculative_config=None, drafter=None, speculator=None)
    assert not drafter_is_known(runner)
