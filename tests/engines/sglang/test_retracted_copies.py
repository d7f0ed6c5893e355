"""Records with the copies of requests that are taken back, in the forms that SGLang has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from canary_kernels.layout import RECORD_WORDS
from canary_obs.engines.sglang.retracted_copies import RetractedCopies
from canary_obs.engines.sglang.transfer_order import TransferOrder
from canary_obs.engines.toolkit.method_patches import MethodPatches
from canary_obs.errors import KVCacheViolation
from canary_obs.vocabulary import HOST_PEER

Arrival = tuple[str, list[int], list[int] | None]


class Observer:
    """A record is its slot's number in every word."""

    def __init__(self) -> None:
        self.arrived: list[Arrival] = []
        self.invalid: list[tuple[str, list[int]]] = []
        self.before: list[tuple[str, list[int]]] = []  # compared before something was written over them
        self.faults: list[str] = []
        self.raised: Exception | None = None

    def records_of(self, group: str, slots: Tensor) -> Tensor:
        return slots[:, None].repeat(1, RECORD_WORDS)

    def received(self, group: str, slots: Tensor, records: Tensor | None = None, peer: str = "") -> None:
        if self.raised is not None:
            raise self.raised
        assert peer == ("" if records is None else HOST_PEER)
        sent = None if records is None else records[:, 0].tolist()
        self.arrived.append((group, slots.tolist(), sent))

    def before_load(self, group: str, slots: Tensor) -> None:
        self.before.append((group, slots.tolist()))

    def invalidated(self, group: str, slots: Tensor) -> None:
        self.invalid.append((group, slots.tolist()))

    def fault(self, part: str, error: Exception) -> None:
        self.faults.append(f"{part}: {error}")


def followed(groups: dict[str, Any], copy: Any) -> tuple[Any, Observer, RetractedCopies, MethodPatches]:
    """An allocator whose copies are `copy`, and what follows it."""
    loaded: list[Any] = []
    allocator = SimpleNamespace(
        get_cpu_copy=lambda indices, **_: copy,
        load_cpu_copy=lambda given, indices, **_: loaded.append(given), loaded=loaded,
    )  # fmt: skip
    observer, patches = Observer(), MethodPatches()
    made = RetractedCopies(allocator, groups, observer, TransferOrder())  # type: ignore[arg-type]
    made.wrap(patches)
    return allocator, observer, made, patches


def group(own: Tensor | None = None, ratio: int = 1) -> Any:
    return SimpleNamespace(own_slots=own, ratio=ratio, by_row=None)


@pytest.mark.parametrize(
    "copy",
    [[[torch.ones(3)]], {"full": [torch.ones(3)]}, ([torch.ones(3)], None)],
    ids=["list", "dict", "tuple"],
)
def test_a_copy_comes_back_with_the_records_it_was_made_with(copy: Any) -> None:
    allocator, observer, made, _ = followed({"full": group()}, copy)
    kept = allocator.get_cpu_copy(torch.tensor([5, 6, 7]), mamba_indices=None)
    assert kept == copy
    allocator.load_cpu_copy(kept, torch.tensor([1, 2, 3]), mamba_indices=None)
    assert allocator.loaded == [copy]
    assert observer.arrived == [("full", [1, 2, 3], [5, 6, 7])]
    assert (made.compared, made.without) == (3, 0)


def test_slots_of_windows_and_of_runs_have_their_own() -> None:
    own = torch.tensor([0, 0, 11, 12, 0, 13, 14, 15])
    allocator, observer, _, _ = followed({"swa": group(own), "c2": group(ratio=2)}, [])
    kept = allocator.get_cpu_copy(torch.tensor([4, 5, 6]))  # the first is out of the window
    allocator.load_cpu_copy(kept, torch.tensor([2, 3, 7]))
    assert observer.invalid == [("swa", [11])], "it has a slot, and nothing was copied there"
    assert observer.arrived == [("swa", [12, 15], [13, 14]), ("c2", [1], [2])]


def test_a_draft_models_kv_is_not_among_what_is_copied() -> None:
    """What lies in the new slots is another request's, or nobody's."""
    allocator, observer, made, _ = followed({"full": group(), "draft": group()}, [[torch.ones(3)]])
    kept = allocator.get_cpu_copy(torch.tensor([5, 6]))
    allocator.load_cpu_copy(kept, torch.tensor([1, 2]))
    assert observer.arrived == [("full", [1, 2], [5, 6])]
    assert observer.invalid == [("draft", [1, 2])]
    assert observer.before == [("full", [1, 2])]
    assert (made.compared, made.without) == (2, 0)


def test_a_copy_that_was_not_followed_comes_back_without_records() -> None:
    allocator, observer, made, _ = followed({"full": group()}, [])
    allocator.load_cpu_copy([], torch.tensor([1, 2]))
    assert observer.arrived == [("full", [1, 2], None)]
    assert (made.compared, made.without) == (0, 2)


def test_copies_of_another_type_are_left_as_they_are() -> None:
    copy = {torch.ones(3)}
    allocator, observer, _, patches = followed({"full": group()}, copy)
    assert allocator.get_cpu_copy(torch.tensor([5])) is copy
    patches.restore()
    allocator.load_cpu_copy(copy, torch.tensor([5]))
    assert observer.arrived == []


def test_a_fault_of_the_canary_does_not_reach_the_engine_and_a_violation_does() -> None:
    allocator, observer, _, _ = followed({"full": group()}, [])
    kept = allocator.get_cpu_copy(None)
    observer.raised = RuntimeError("made up")
    allocator.load_cpu_copy(kept, torch.tensor([1]))
    assert observer.before == [("full", [1])]
    assert len(observer.faults) == 2
    assert observer.faults[1] == "host_tier: made up"
    observer.raised = KVCacheViolation.__new__(KVCacheViolation)
    with pytest.raises(KVCacheViolation):
        allocator.load_cpu_copy(kept, torch.tensor([1]))
