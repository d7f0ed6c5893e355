"""Which records LMCache's chunks have; with LMCache itself: real/test_lmcache.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from canary_obs.copy_records.record_files import RecordFiles
from canary_obs.copy_records.stored_copies import StoredCopies
from canary_obs.engines.toolkit.method_patches import MethodPatches
from canary_obs.engines.vllm.connector_loads import ConnectorLoads
from canary_obs.engines.vllm.groups import VllmGroup
from canary_obs.engines.vllm.lmcache_records import LmcacheRecords
from canary_obs.vocabulary import HOST_PEER
from tests.engines.vllm.taken_copies import taken

SIZE, CHUNK = 4, 8


class Key:
    def __init__(self, name: str) -> None:
        self.name = name

    def to_string(self) -> str:
        return self.name


class FSConnector:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _get_file_path(self, key: Key) -> Path:
        return self.folder / f"{key.name}.data"


class LocalCPUBackend:
    pass


class NaiveSerializer:
    pass


class RemoteBackend:
    def __init__(self, connection: Any, serializer: Any) -> None:
        self.connection, self.serializer = SimpleNamespace(_connector=connection), serializer


class Cache:
    """As LMCache's engine: what it is asked to store and to find, by a request's tokens."""

    def __init__(self, **backends: Any) -> None:
        self.config = SimpleNamespace(chunk_size=CHUNK, enable_blending=False, use_layerwise=False)
        self.gpu_connector = SimpleNamespace(batched_from_gpu=lambda *_, **__: None)
        self.storage_manager = SimpleNamespace(storage_backends=backends, batched_put=lambda *_: None)
        self.found: list[tuple[Key, Any, int, int]] = []

    def _process_tokens_internal(self, *_: Any, **__: Any) -> Any:
        return self.found, 0

    _async_process_tokens_internal = _process_tokens_internal


class Observer:
    """Block b holds records that fold to (b, -b); odd blocks are not complete."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.begun: list[list[int]] = []
        self.compared: set[int] = set()  # blocks, before a load

    def block_folds(self, group: str, slots: torch.Tensor, *, baselines: bool = False) -> torch.Tensor:
        blocks = slots[:, 0] // SIZE
        return torch.stack((1 - blocks % 2, blocks, -blocks), 1)

    def load_begun(self, load: str, group: str, blocks: Any) -> None:
        self.begun.append((blocks.slots[:, 0] // SIZE).tolist())
        assert set(self.begun[-1]) <= self.compared

    def before_load(self, group: str, slots: torch.Tensor) -> None:
        self.compared.update((slots // SIZE).tolist())

    def fault(self, part: str, error: Exception) -> None:
        self.faults.append(f"{part}: {error}")


def _group(number: int, name: str) -> VllmGroup:
    view: Any = SimpleNamespace(name=name)
    return VllmGroup(number=number, num_blocks=32, block_size=SIZE, view=view, layers=())


class Worker:
    """One life of a worker."""

    def __init__(self, **backends: Any) -> None:
        groups = [_group(0, "full"), _group(1, "other")]
        self.observer: Any = Observer()
        self.files, self.cache = RecordFiles(None), Cache(**backends)
        self.loads = ConnectorLoads(groups[:1], torch.device("cpu"))
        stored = StoredCopies(lambda: {"full": 7}, self.files, rewritten=True)
        self.records = LmcacheRecords(groups, self.loads, self.observer, stored)
        connector = SimpleNamespace(_lmcache_engine=SimpleNamespace(lmcache_engine=self.cache))
        self.followed = self.records.wrap(MethodPatches(), connector)

    def begin(self, request: str, blocks: Sequence[int], load: Any = None) -> None:
        """A step with one request."""
        slots = torch.tensor(blocks)[:, None] * SIZE + torch.arange(SIZE)
        meta = LMCacheConnectorMetadata()
        tokens = list(range(len(blocks) * SIZE))
        meta.requests = [
            SimpleNamespace(req_id=request, slot_mapping=slots.flatten(), token_ids=tokens, load_spec=load)
        ]
        self.records.follow(SimpleNamespace(kv_connector_metadata=meta))

    def store(self, request: str, blocks: Sequence[int], *keys: str) -> None:
        """One step that stores a chunk for each key."""
        self.begin(request, blocks)
        starts = [number * CHUNK for number in range(len(keys))]
        objects = [object() for _ in keys]
        self.cache.gpu_connector.batched_from_gpu(
            objects, starts, [start + CHUNK for start in starts], req_id=request
        )
        self.cache.storage_manager.batched_put([Key(key) for key in keys], objects)
        self.records.stores.end_forward()
        self.files.settle()

    def loaded(self, blocks: Sequence[int], *keys: str) -> list[tuple[tuple[int, int], ...]]:
        """What these blocks of a request, to which chunks of these keys are copied, are compared with."""
        self.begin("later", blocks, SimpleNamespace(can_load=True, vllm_cached_tokens=0))
        taken(self.loads.copies)
        self.cache.found = [
            (Key(key), object(), number * CHUNK, (number + 1) * CHUNK) for number, key in enumerate(keys)
        ]
        assert self.cache._process_tokens_internal([], None, None, req_id="later")[0] is self.cache.found
        found = taken(self.loads.copies)
        assert set(found) == {("full", block) for block in blocks}
        self.peers = {sent.peer for sent in found.values()}
        return [found["full", block].folds for block in blocks]


class LMCacheConnectorMetadata:
    requests: list[Any]


@pytest.fixture
def workers() -> Iterator[list[Worker]]:
    made: list[Worker] = []
    yield made
    for worker in made:
        assert worker.observer.faults == []
        worker.files.close()


def test_a_load_is_compared_with_what_its_chunk_was_stored_as(workers: list[Worker]) -> None:
    worker = Worker(cpu=LocalCPUBackend())
    workers.append(worker)
    worker.store("first", [2, 4, 6, 8], "a", "b")
    assert worker.loaded([10, 12, 14, 16], "b", "a") == [((6, -6),), ((8, -8),), ((2, -2),), ((4, -4),)]
    assert worker.peers == {HOST_PEER}
    assert worker.loaded([10, 12], "c") == [(), ()]


def test_records_that_are_not_complete_vouch_for_nothing(workers: list[Worker]) -> None:
    worker = Worker(cpu=LocalCPUBackend())
    workers.append(worker)
    worker.store("first", [2, 5], "a")
    assert worker.loaded([10, 12], "a") == [((2, -2),), ()]


def test_blocks_that_a_chunk_does_not_hold_whole_are_not_compared(workers: list[Worker]) -> None:
    worker = Worker(cpu=LocalCPUBackend())
    workers.append(worker)
    worker.begin("first", [2, 4, 6])
    assert worker.records._blocks("first", 0, 11) == [(0, 2), (1, 4)]
    assert worker.records._blocks("first", 2, 12) == []
    assert worker.records._blocks("unknown", 0, 8) == []


def test_a_forward_that_failed_has_stored_nothing(workers: list[Worker]) -> None:
    worker = Worker(cpu=LocalCPUBackend())
    workers.append(worker)
    worker.begin("first", [2, 4])
    objects = [object()]
    worker.cache.gpu_connector.batched_from_gpu(objects, [0], [CHUNK], req_id="first")
    worker.cache.storage_manager.batched_put([Key("a")], objects)
    assert worker.loaded([10, 12], "a") == [(), ()]


def test_a_forward_that_failed_after_one_that_ended_has_stored_nothing(workers: list[Worker]) -> None:
    worker = Worker(cpu=LocalCPUBackend())
    workers.append(worker)
    worker.begin("before", [6])
    worker.records.stores.end_forward()
    worker.begin("first", [2, 4])
    objects = [object()]
    worker.cache.gpu_connector.batched_from_gpu(objects, [0], [CHUNK], req_id="first")
    worker.cache.storage_manager.batched_put([Key("a")], objects)
    assert worker.loaded([10, 12], "a") == [(), ()]


def test_what_is_stored_when_the_forward_has_ended_is_known_a_step_later(workers: list[Worker]) -> None:
    """The V2 model runner's connector stores after sampling."""
    worker = Worker(cpu=LocalCPUBackend())
    workers.append(worker)
    worker.begin("first", [2, 4])
    worker.records.stores.end_forward()
    objects = [object()]
    worker.cache.gpu_connector.batched_from_gpu(objects, [0], [CHUNK], req_id="first")
    worker.cache.storage_manager.batched_put([Key("a")], objects)
    assert worker.loaded([10, 12], "a") == [((2, -2),), ((4, -4),)]


def test_what_is_put_without_being_copied_is_not_known(workers: list[Worker]) -> None:
    """What LMCache moves from tier to tier, for one."""
    worker = Worker(cpu=LocalCPUBackend())
    workers.append(worker)
    worker.begin("first", [2, 4])
    worker.cache.gpu_connector.batched_from_gpu([object()], [0], [CHUNK], req_id="first")
    worker.cache.storage_manager.batched_put([Key("a")], [object()])
    worker.records.stores.end_forward()
    assert worker.loaded([10, 12], "a") == [(), ()]


def test_records_lie_next_to_shared_files(workers: list[Worker], tmp_path: Path) -> None:
    lives = [Worker(remote=RemoteBackend(FSConnector(tmp_path), NaiveSerializer())) for _ in range(3)]
    workers += lives
    lives[0].store("first", [2, 4], "a")
    (tmp_path / "a.data").write_bytes(b"kv")
    assert lives[1].loaded([10, 12], "a") == [((2, -2),), ((4, -4),)]
    assert lives[1].peers == {""}, "nobody says which tier it came from"
    lives[1].store("second", [6, 8], "a")  # replaces the file, sooner or later
    assert lives[0].loaded([10, 12], "a") == [((2, -2), (6, -6)), ((4, -4), (8, -8))]
    for path in tmp_path.glob("*.kvcanary"):
        path.unlink()
    assert lives[2].loaded([10, 12], "a") == [(), ()]
    lives[2].store("third", [2, 4], "a")
    assert lives[2].loaded([10, 12], "a") == [(), ()], "it may be somebody else's file that is loaded"


def test_a_chunk_is_compared_in_the_blocks_that_were_cached(workers: list[Worker]) -> None:
    worker = Worker(cpu=LocalCPUBackend())
    workers.append(worker)
    worker.begin("a", [2, 4, 6, 8], SimpleNamespace(can_load=True, vllm_cached_tokens=3 * SIZE))
    assert worker.observer.begun == [[6]], "its chunk starts there"
    worker.begin("a", [2, 4, 6, 8], SimpleNamespace(can_load=False, vllm_cached_tokens=3 * SIZE))
    worker.begin("a", [2, 4, 6, 8], SimpleNamespace(can_load=True, vllm_cached_tokens=CHUNK))
    assert len(worker.observer.begun) == 1


def test_a_chunk_that_two_requests_store_in_one_step_has_a_record(
    workers: list[Worker], tmp_path: Path
) -> None:
    lives = [Worker(remote=RemoteBackend(FSConnector(tmp_path), NaiveSerializer())) for _ in range(2)]
    workers += lives
    lives[0].begin("first", [2, 4])
    for _ in range(2):
        objects = [object()]
        lives[0].cache.gpu_connector.batched_from_gpu(objects, [0], [CHUNK], req_id="first")
        lives[0].cache.storage_manager.batched_put([Key("a")], objects)
        (tmp_path / "a.data").write_bytes(b"kv")
    lives[0].records.stores.end_forward()
    lives[0].files.settle()
    assert lives[1].loaded([10, 12], "a") == [((2, -2),), ((4, -4),)]


@pytest.mark.parametrize("other", ["peers", "lossy", "blending", "layers", "two"])
def test_what_other_tiers_hold_is_not_known(tmp_path: Path, other: str) -> None:
    files = RemoteBackend(FSConnector(tmp_path), object() if other == "lossy" else NaiveSerializer())
    backends: dict[str, Any] = {"cpu": LocalCPUBackend(), "remote": files}
    if other == "peers":
        backends["peers"] = object()
    elif other == "two":
        backends["second"] = files
    records = Worker(**backends).records
    records._engine.config.enable_blending = other == "blending"
    records._engine.config.use_layerwise = other == "layers"
    connector = SimpleNamespace(_lmcache_engine=SimpleNamespace(lmcache_engine=records._engine))
    assert not records.wrap(MethodPatches(), connector)
