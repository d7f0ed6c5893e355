"""Which records a folder of vLLM's ExampleConnector has; with the connector itself: real/test_disk.py."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from canary_obs.copy_records.record_files import RecordFiles
from canary_obs.copy_records.stored_copies import StoredCopies
from canary_obs.engines.toolkit.method_patches import MethodPatches
from canary_obs.engines.vllm.disk_records import DiskRecords
from canary_obs.engines.vllm.offload_keys import connectors_named
from canary_obs.engines.vllm.sent_copies import Copies
from tests.engines.vllm.taken_copies import taken

SIZE = 4


class ExampleConnector:
    """As vLLM's: what names a copy, and what a step is bound to."""

    _block_size = SIZE

    def __init__(self, folder: Path) -> None:
        self._folder, self.bound = folder, list[Any]()

    def _generate_foldername_debug(
        self, tokens: torch.Tensor, mm_hashes: list[str], *, create_folder: bool
    ) -> str:
        assert not create_folder, "an empty folder is a hit"
        return str(self._folder / str(int(tokens.sum())))

    def bind_connector_metadata(self, metadata: Any) -> None:
        self.bound.append(metadata)


class Observer:
    """Block b holds records that fold to (b, -b); odd blocks are not complete."""

    def __init__(self) -> None:
        self.faults: list[str] = []

    def block_folds(self, group: str, slots: torch.Tensor, *, baselines: bool = False) -> torch.Tensor:
        blocks = slots[:, 0] // SIZE
        return torch.stack((1 - blocks % 2, blocks, -blocks), 1)

    def fault(self, part: str, error: Exception) -> None:
        self.faults.append(part)


class Worker:
    """One life of a worker."""

    def __init__(self, folder: Path) -> None:
        groups: Any = [
            SimpleNamespace(
                number=0, block_size=SIZE, block_slots=SIZE, view=SimpleNamespace(name="full"), states=False
            ),
            SimpleNamespace(
                number=1, block_size=SIZE, block_slots=SIZE, view=SimpleNamespace(name="other"), states=False
            ),
        ]
        self.copies = Copies()
        self.observer: Any = Observer()
        self.files = RecordFiles(None)
        stored = StoredCopies(lambda: {"full": 7}, self.files)
        self.records = DiskRecords(groups, self.copies, self.observer, stored)
        self.connector, self.folder = ExampleConnector(folder), folder
        self.records.wrap(MethodPatches(), self.connector)

    def store(self, tokens: int, blocks: list[int]) -> None:
        """One step."""
        self.connector.bind_connector_metadata(SimpleNamespace(requests=[request(tokens, blocks, True)]))
        (self.folder / str(tokens)).mkdir(exist_ok=True)
        self.records.stores.end_forward()
        self.files.settle()

    def loaded(self, tokens: int, blocks: list[int]) -> list[tuple[tuple[int, int], ...]]:
        metadata = SimpleNamespace(requests=[request(tokens, blocks, False)])
        self.connector.bind_connector_metadata(metadata)
        assert self.connector.bound[-1] is metadata
        found = taken(self.copies)
        assert set(found) == {("full", block) for block in blocks}
        assert {(sent.filled, sent.peer) for sent in found.values()} == {(SIZE, "")}
        return [found["full", block].folds for block in blocks]


def request(tokens: int, blocks: list[int], store: bool) -> Any:
    slots = torch.tensor(blocks)[:, None] * SIZE + torch.arange(SIZE)
    return SimpleNamespace(
        token_ids=torch.tensor([tokens]), slot_mapping=slots.flatten(), is_store=store, mm_hashes=[]
    )


def test_a_load_is_compared_with_what_its_folder_was_stored_as(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    worker.store(70, [2, 4])
    worker.store(71, [6, 8])
    assert worker.loaded(71, [3, 5]) == [((6, -6),), ((8, -8),)]
    assert worker.loaded(72, [3]) == [()]
    worker.files.close()


def test_records_that_are_not_complete_vouch_for_nothing(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    worker.store(70, [2, 5])
    assert worker.loaded(70, [2, 4]) == [((2, -2),), ()]
    worker.files.close()


def test_records_outlive_the_worker_next_to_the_folder(tmp_path: Path) -> None:
    first = Worker(tmp_path)
    first.store(70, [2, 4])
    first.files.close()
    (path,) = tmp_path.glob("*.kvcanary")
    second = Worker(tmp_path)
    assert second.loaded(70, [3, 5]) == [((2, -2),), ((4, -4),)]
    path.unlink()
    third = Worker(tmp_path)
    assert third.loaded(70, [3, 5]) == [(), ()]
    second.files.close()
    third.files.close()


def test_a_folder_that_was_there_already_is_somebody_elses(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    (tmp_path / "70").mkdir()
    worker.store(70, [2, 4])
    assert list(tmp_path.glob("*.kvcanary")) == []
    assert worker.loaded(70, [3, 5]) == [(), ()]
    worker.files.close()


def test_a_forward_that_failed_has_stored_nothing(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    worker.connector.bind_connector_metadata(SimpleNamespace(requests=[request(70, [2], True)]))
    worker.connector.bind_connector_metadata(SimpleNamespace(requests=[]))
    worker.records.stores.end_forward()
    assert worker.loaded(70, [2]) == [()]
    worker.files.close()


def test_a_fault_reaches_the_canary_and_not_the_engine(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    unknown = SimpleNamespace(requests=[object()])
    worker.connector.bind_connector_metadata(unknown)
    assert worker.connector.bound == [unknown]
    assert worker.observer.faults == ["announce"]
    worker.files.close()


@pytest.mark.parametrize("nested", [False, True])
def test_connectors_are_known_by_their_class_at_any_depth(tmp_path: Path, nested: bool) -> None:
    own = ExampleConnector(tmp_path)
    connector: Any = SimpleNamespace(sub_connectors=[object(), own]) if nested else own
    assert list(connectors_named(connector, {"ExampleConnector"})) == [own]
    assert list(connectors_named(connector, {"OffloadingConnector"})) == []
