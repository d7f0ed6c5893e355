"""What a prefill worker learns of the ranks that read from it; with real engines: real/test_mooncake.py."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from canary_obs.engines.toolkit.method_patches import MethodPatches
from canary_obs.engines.vllm.transfer_readers import TransferReaders

SIZE = 4
HALVES, QUARTERS = [range(2), range(2, 4)], [range(head, head + 1) for head in range(4)]


class Observer:
    """Has seen the shares of these groups."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Sequence[range]]] = []
        self.faults: list[str] = []
        self.protects = True

    def block_folds(self, group: str, slots: torch.Tensor, *, shares: Sequence[range]) -> torch.Tensor | None:
        assert slots.tolist() == [[-1] * SIZE]
        self.asked.append((group, shares))
        return torch.zeros(1) if self.protects else None

    def fault(self, part: str, error: Exception) -> None:
        self.faults.append(part)


def made(observer: Observer) -> TransferReaders:
    """Of a worker with a group of four heads and one of a single head."""
    groups: list[Any] = []
    for name, heads in (("full", 4), ("latent", 1)):
        source = SimpleNamespace(head_start=0, num_heads=heads, head_bytes=64, tensor=torch.zeros(1))
        groups.append(SimpleNamespace(view=SimpleNamespace(name=name, sources=[source]), block_slots=SIZE))
    return TransferReaders(groups, observer)  # type: ignore[arg-type]


def after(readers: TransferReaders, *ranks: int) -> dict[str, list[range]]:
    for each in ranks:
        readers.note(each)
        readers.close()
    return readers.shares


def test_the_heads_are_split_for_all_engines_that_read() -> None:
    observer = Observer()
    readers = made(observer)
    assert after(readers, 1) == {}
    assert after(readers, 2) == {"full": HALVES}
    assert after(readers, 4, 2, 1) == {"full": QUARTERS}
    assert after(readers, 3, 0, -1, 1 << 40) == {"full": QUARTERS}
    assert observer.asked == [("full", HALVES), ("full", QUARTERS)], "each was launched once before its use"
    assert observer.faults == []


@pytest.mark.parametrize("protects", [True, False])
def test_what_cannot_be_launched_is_not_used_and_not_tried_again(protects: bool) -> None:
    observer = Observer()
    observer.protects = protects
    readers = made(observer)
    if protects:
        observer.block_folds = lambda *_, **__: 1 / 0  # type: ignore[assignment, method-assign]
    assert after(readers, 2, 2) == {}
    assert observer.faults == ["announce"] * protects
    assert len(observer.asked) == 1 - protects


class NixlPullConnector:
    """Has a worker, whose agent hears from decode engines."""

    def __init__(self, said: dict[str, list[bytes]], **worker: Any) -> None:
        self.agent = SimpleNamespace(get_new_notifs=lambda: said)
        self.connector_worker = SimpleNamespace(nixl_wrapper=self.agent, **worker)


@pytest.mark.parametrize(
    ("said", "worker", "found"),
    [
        ([b"r-1:2"], {"expected_consumer_notifications_by_req": {}}, HALVES),
        ([b"a:b:4"], {"expected_consumer_notifications_by_req": {}}, QUARTERS),
        ([b"r-1:4"], {"world_size": 2}, HALVES),  # an older version: all of its ranks
        ([b"r-1:2"], {"world_size": 2}, None),
        ([b"HB:4", b"HB:r-1,2"], {"expected_consumer_notifications_by_req": {}}, None),
        ([b"HB:r:4"], {"expected_consumer_notifications_by_req": {}}, None),
        ([b"r-1:many", b""], {"expected_consumer_notifications_by_req": {}}, None),
    ],
)
def test_nixl_says_how_many_ranks_have_read(
    said: list[bytes], worker: Any, found: list[range] | None
) -> None:
    observer, patches = Observer(), MethodPatches()
    readers, connector = made(observer), NixlPullConnector({"decode": said}, **worker)
    readers.wrap(patches, connector)
    assert connector.agent.get_new_notifs() == {"decode": said}
    readers.close()
    assert readers.shares == ({} if found is None else {"full": found})
    assert observer.faults == []
    patches.restore()
    assert connector.agent.get_new_notifs() == {"decode": said}


def test_what_nixl_says_in_another_form_does_not_reach_the_engine() -> None:
    observer = Observer()
    said: Any = {"decode": ["r-1:2"]}
    connector = NixlPullConnector(said, world_size=1)
    made(observer).wrap(MethodPatches(), connector)
    assert connector.agent.get_new_notifs() is said
    assert observer.faults == ["announce"]


def test_a_worker_of_another_version_is_left_alone() -> None:
    connector = NixlPullConnector({})
    del connector.agent.get_new_notifs
    made(Observer()).wrap(MethodPatches(), connector)
    assert vars(connector.agent) == {}
