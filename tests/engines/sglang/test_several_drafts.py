"""What the forwards of several draft models extend, as the target's forward of their batch has it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from canary_obs.engine_api.views import GroupStep, StepView
from canary_obs.engines.sglang.several_drafts import SeveralDrafts, are_several

TABLE = torch.arange(40, dtype=torch.int32).view(4, 10)
WINDOWS = TABLE + 100
MAPPING = torch.arange(40) // 2 * (torch.arange(40) != 24)


def shown() -> StepView:
    """The target verifies two tokens of one request, and three of another."""
    return StepView(
        request_ids=["a", "b"], rows=torch.tensor([2, 3]), prefix_lens=torch.tensor([3, 4]),
        extend_lens=torch.tensor([2, 3]), token_starts=torch.tensor([0, 2, 5]),
        input_ids=torch.tensor([20, 21, 30, 31, 32]), positions=torch.tensor([3, 4, 4, 5, 6]),
        digests=torch.tensor([7, 8]), known_lens=torch.tensor([4, 5]), known_digests=torch.tensor([1, 2]),
        groups={name: GroupStep(slot_table=table, out_slots=table[0]) for name, table in
                (("full", TABLE), ("swa", WINDOWS))},
    )  # fmt: skip


def runner(number: int | None, *, windows: bool = False) -> Any:
    return SimpleNamespace(
        draft_model_idx=number,
        token_to_kv_pool=SimpleNamespace(**{"swa_kv_pool": object()} if windows else {}),
        token_to_kv_pool_allocator=SimpleNamespace(full_to_swa_index_mapping=MAPPING),
    )


def batch(**changed: Any) -> Any:
    """As the draft model is given it: its inputs are rotated."""
    given = {
        "req_pool_indices": torch.tensor([2, 3]), "input_ids": torch.tensor([1, 1, 1, 1, 1]),
        "positions": torch.tensor([3, 4, 4, 5, 9]), "out_cache_loc": torch.tensor([23, 24, 34, 35, 36]),
    }  # fmt: skip
    return SimpleNamespace(**given | changed)


def test_a_slot_has_its_own_token_and_the_models_own_place() -> None:
    target: Any = SimpleNamespace(last=None)
    drafts = SeveralDrafts(target)
    assert target.keeps_last
    target.last = shown()
    view = drafts.build(runner(1), batch())
    assert list(view.groups) == ["draft_1"]
    assert view.input_ids.tolist() == [20, 21, 30, 31, 32]
    assert view.positions.tolist() == [3, 4, 4, 5, 9], "what the model is given"
    assert view.groups["draft_1"].out_slots.tolist() == [23, 24, 34, 35, 36]
    assert view.groups["draft_1"].slot_table is TABLE
    assert view.known_lens is view.known_digests is None, "the target's forward compares them"


def test_windows_are_in_the_targets_slots_for_them() -> None:
    view = SeveralDrafts(SimpleNamespace(last=shown(), keeps_last=True)).build(
        runner(0, windows=True), batch()
    )
    assert view.groups["draft_0"].out_slots.tolist() == [11, -1, 17, 17, 18]
    assert view.groups["draft_0"].slot_table is WINDOWS


def test_another_batch_than_the_targets_is_not_shown() -> None:
    target: Any = SimpleNamespace(last=shown(), keeps_last=True)
    drafts = SeveralDrafts(target)
    with pytest.raises(LookupError, match="extends 2 requests by 4 tokens, the target 2 by 5"):
        drafts.build(runner(0), batch(out_cache_loc=torch.tensor([23, 24, 34, 35])))
    with pytest.raises(LookupError, match="extends 1 requests"):
        drafts.build(runner(0), batch(req_pool_indices=torch.tensor([2])))
    drafts.begin()
    with pytest.raises(LookupError, match="draft_0 runs before the target"):
        drafts.build(runner(0), batch())


def test_one_with_a_number_is_among_several() -> None:
    assert are_several([runner(0)])
    assert not are_several([runner(None)])
    assert not are_several([])
