"""Where accepted nodes of a tree of drafts end up, and what their slots hold then."""

from __future__ import annotations

from typing import Any

import torch

from canary_obs.copy_records.draft_trees import DraftTrees, slots_after
from canary_obs.engine_api.views import GroupStep, StepView

TABLE = torch.arange(40, dtype=torch.int32).view(4, 10)


class Copies:
    """An observer that keeps what it is given."""

    def __init__(self) -> None:
        self.copied_slots: list[tuple[str, list[int], list[int]]] = []

    def copied(self, group: str, source: Any, destination: Any) -> None:
        self.copied_slots.append((group, source.tolist(), destination.tolist()))


def trees(windows: Any = None) -> DraftTrees:
    groups = {"full": None} if windows is None else {"full": None, "swa": windows}
    return DraftTrees(groups, TABLE, 40)


def verification(groups: tuple[str, ...] = ("full",)) -> StepView:
    """Four nodes after two tokens of row 2, and after three of row 3."""
    slots = torch.tensor([22, 23, 24, 25, 33, 34, 35, 36])
    return StepView(
        request_ids=["a", "b"], rows=torch.tensor([2, 3]), prefix_lens=torch.tensor([2, 3]),
        extend_lens=torch.tensor([4, 4]), token_starts=torch.tensor([0, 4, 8]),
        input_ids=torch.arange(100, 108), positions=torch.tensor([2, 3, 4, 5, 3, 4, 5, 6]), digests=None,
        groups={name: GroupStep(slot_table=TABLE, out_slots=slots) for name in groups},
    )  # fmt: skip


DEPTHS = torch.tensor([2, 3, 3, 4, 3, 4, 4, 5])


def test_an_accepted_path_has_what_was_moved_into_its_slots() -> None:
    followed, view, observer = trees(), verification(), Copies()
    followed.verifying(view, view.groups["full"].out_slots, DEPTHS)
    # Of the first tree the root, and its third and fourth nodes; of the second the root.
    followed.moved(torch.tensor([22, 23, 24, 33, 0]), torch.tensor([22, 24, 25, 33, 0]), observer)  # type: ignore[arg-type]
    assert observer.copied_slots == [("full", [24, 25], [23, 24])]
    path = followed.path(torch.tensor([3, 1], dtype=torch.int32))
    assert path is not None
    assert path.input_ids.tolist() == [100, 102, 103, 104]
    assert path.positions.tolist() == [2, 3, 4, 3]
    assert path.token_starts.tolist() == [0, 3, 4]
    assert path.groups["full"].out_slots.tolist() == [22, 23, 24, 33]
    assert followed.paths == 1
    assert followed.path(torch.tensor([1, 1])) is None, "it is shown once"


def test_a_node_that_is_not_moved_is_found_at_its_old_depth() -> None:
    followed, view = trees(), verification()
    followed.verifying(view, view.groups["full"].out_slots, DEPTHS)
    path = followed.path(torch.tensor([4, 1]))
    assert path is not None
    assert path.positions.tolist() == [2, 3, 3, 4, 3]


def test_windows_have_slots_of_their_own() -> None:
    windows = torch.zeros(40, dtype=torch.int64)
    windows[[22, 23, 25, 33]] = torch.tensor([7, 8, 9, 6])
    followed, view, observer = trees(windows), verification(("full", "swa")), Copies()
    followed.verifying(view, view.groups["full"].out_slots, DEPTHS)
    followed.moved(torch.tensor([23]), torch.tensor([25]), observer)  # type: ignore[arg-type]
    assert observer.copied_slots == [("full", [25], [23]), ("swa", [9], [8])]
    path = followed.path(torch.tensor([3, 1]))
    assert path is not None
    assert path.groups["swa"].out_slots.tolist() == [7, 8, -1, 6]


def test_slots_after_a_prefix_end_with_the_table() -> None:
    rows, prefixes, counts = torch.tensor([1, 2]), torch.tensor([8, 1]), torch.tensor([3, 1])
    assert slots_after(TABLE, rows, prefixes, counts).tolist() == [18, 19, -1, 21, -1, -1]
