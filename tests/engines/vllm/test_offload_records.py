"""Which records a job of vLLM's OffloadingConnector concerns; with real tiers: real/test_offloading.py."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from canary_obs.copy_records.record_files import RecordFiles
from canary_obs.copy_records.stored_copies import StoredCopies
from canary_obs.engine_api.requests import ChangedRequests
from canary_obs.engines.toolkit.method_patches import MethodPatches
from canary_obs.engines.vllm.offload_keys import (
    KEYS_ATTRIBUTE,
    StoredKey,
    instrument_managers,
    offloading_connectors,
    send_keys,
)
from canary_obs.engines.vllm.offload_records import (
    OffloadRecords,
    folds_of,
    is_followed,
    jobs_of,
    parts_of,
)
from canary_obs.engines.vllm.sent_copies import Copies
from canary_obs.vocabulary import HOST_PEER
from tests.engines.vllm.taken_copies import Taken, taken

SIZE = 4


class OffloadingConnector:
    """As vLLM's: known by its name."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class FileSystemTierManager:
    file_mapper = SimpleNamespace(get_file_name=lambda key: f"/tier/{key[0]}.bin")


def device(blocks: list[int], sizes: list[int], first: list[int]) -> Any:
    return SimpleNamespace(block_ids=np.array(blocks), group_sizes=sizes, block_indices=first)


def tier(chunks: list[int]) -> Any:
    return SimpleNamespace(block_ids=np.array(chunks))


def test_blocks_and_chunks_are_paired_as_vllm_copies_them() -> None:
    assert [tuple(part) for part in parts_of(device([7, 8], [2], [0]), tier([3, 4]), 1)] == [
        (7, 3, 0), (8, 4, 0),
    ]  # fmt: skip
    # Chunks of three blocks; the first group begins within a chunk, the second has nothing to copy.
    found = parts_of(device([7, 8, 9, 5], [3, 0, 1], [5, 0, 3]), tier([1, 2, 6]), 3)
    assert [tuple(part) for part in found] == [(7, 1, 2), (8, 2, 0), (9, 2, 1), (5, 6, 0)]


def manager(*tiers: Any) -> Any:
    return SimpleNamespace(
        secondary_tiers=tiers,
        prepare_store=lambda keys, context: SimpleNamespace(keys_to_store=keys[1:], store_spec=tier([5])),
        prepare_load=lambda keys, context: tier([6, 7]),
    )


@pytest.mark.parametrize("tiers", [(), (FileSystemTierManager(),)])
def test_keys_travel_with_the_jobs_of_their_step(tiers: Any) -> None:
    own = manager(*tiers)
    connector = OffloadingConnector(connector_scheduler=SimpleNamespace(manager=own))
    scheduler = SimpleNamespace(connector=SimpleNamespace(sub_connectors=[object(), connector]))
    patches = MethodPatches()
    instrument_managers(patches, scheduler.connector)
    own.prepare_store([b"1", b"2"], None)
    own.prepare_load(iter([b"3", b"4"]), None)
    output = SimpleNamespace()
    send_keys(scheduler, output)
    path = "/tier/{}.bin" if tiers else ""
    expected = {5: b"2", 6: b"3", 7: b"4"}
    assert getattr(output, KEYS_ATTRIBUTE) == (
        {chunk: StoredKey(key, path.format(key[0])) for chunk, key in expected.items()},
    )
    send_keys(scheduler, output)
    assert getattr(output, KEYS_ATTRIBUTE) == ({},), "a step later a chunk may hold another key"
    patches.restore()
    own.prepare_store([b"1", b"2"], None)
    send_keys(scheduler, output)
    assert getattr(output, KEYS_ATTRIBUTE) == ({},)


@pytest.mark.parametrize("tiers", [(object(),), (FileSystemTierManager(), FileSystemTierManager())])
def test_what_other_tiers_hold_is_not_known(tiers: Any) -> None:
    own = manager(*tiers)
    connector = OffloadingConnector(connector_scheduler=SimpleNamespace(manager=own))
    instrument_managers(MethodPatches(), connector)
    own.prepare_load([b"3", b"4"], None)
    output = SimpleNamespace()
    send_keys(SimpleNamespace(connector=connector), output)
    assert getattr(output, KEYS_ATTRIBUTE) == ({},)


def test_an_engine_without_a_connector_sends_nothing() -> None:
    output = SimpleNamespace()
    send_keys(SimpleNamespace(connector=None), output)
    assert vars(output) == {}
    assert list(offloading_connectors(SimpleNamespace())) == []


class Observer:
    """Block b holds records that fold to (b, -b); odd blocks are not complete."""

    def __init__(self) -> None:
        self.shown = list[tuple[str, str, dict[int, bytes]]]()  # stored or loaded, group, key by block

    def requests_changed(self, shown: ChangedRequests) -> None:
        for way in ("stored", "loaded"):
            for name, own in getattr(shown, way).items():
                self.shown.append((way, name, dict(zip(own.blocks.tolist(), own.keys, strict=True))))

    def block_folds(self, group: str, slots: torch.Tensor, *, baselines: bool = False) -> torch.Tensor:
        blocks = slots[:, 0] // SIZE
        return torch.stack((1 - blocks % 2, blocks, -blocks), 1)

    def fault(self, part: str, error: Exception) -> None:
        raise error


@pytest.fixture
def followed() -> tuple[OffloadRecords, Copies, Any]:
    groups: Any = [
        SimpleNamespace(
            number=number, block_slots=SIZE, view=SimpleNamespace(name=name), states=False, of_tokens=True
        )
        for number, name in ((0, "full"), (1, "swa"), (1, "draft"))
    ]
    copies = Copies()
    records = OffloadRecords(groups, copies, Observer(), StoredCopies(dict, None), list)  # type: ignore[arg-type]
    worker = SimpleNamespace(submit_store=lambda *_: True, submit_load=lambda *_: True)
    spec = SimpleNamespace(blocks_per_chunk=1)
    patches = MethodPatches()
    records.wrap(patches, SimpleNamespace(connector_worker=SimpleNamespace(spec=spec, worker=worker)))
    return records, copies, worker


def key(name: bytes, group: int) -> StoredKey:
    return StoredKey(name + group.to_bytes(4, "big"), "")


def jobs(*, stores: Any = None, loads: Any = None) -> Any:
    def made(given: Any, side: str) -> Any:
        return {number: SimpleNamespace(**{side: tier(chunks)}) for number, chunks in (given or {}).items()}

    return SimpleNamespace(store_jobs=made(stores, "dst_spec"), load_jobs=made(loads, "src_spec"))


def test_a_load_is_compared_with_what_its_key_was_stored_as(followed: Any) -> None:
    records, copies, worker = followed
    records.follow(jobs(stores={1: [3, 4]}), {3: key(b"a", 0), 4: key(b"b", 1)})
    # Submitted a step later, when the chunks may be others' already.
    records.follow(jobs(stores={9: [3, 4]}), {3: key(b"x", 0), 4: key(b"x", 1)})
    assert worker.submit_store(1, device([8, 6], [1, 1], [0, 0]), tier([3, 4]))
    records.follow(jobs(loads={2: [9, 4]}), {9: key(b"a", 0), 4: key(b"b", 1)})
    assert worker.submit_load(2, tier([9, 4]), device([20, 21], [1, 1], [0, 0]))
    found = taken(copies)
    assert {place: sent.folds for place, sent in found.items()} == {
        ("full", 20): ((8, -8),), ("swa", 21): ((6, -6),), ("draft", 21): ((6, -6),),
    }  # fmt: skip
    assert {(sent.filled, sent.peer) for sent in found.values()} == {(SIZE, HOST_PEER)}


def test_after_which_event_a_load_is_copied_is_known_where_the_worker_keeps_it(followed: Any) -> None:
    records, copies, worker = followed
    records.follow(jobs(loads={number: [9] for number in (1, 2, 3, 4)}), {9: key(b"a", 0)})
    load = tier([9]), device([20], [1], [0])
    assert worker.submit_load(1, *load)
    first, second = torch.Event("cpu"), torch.Event("cpu")
    worker._load_handler = SimpleNamespace(_transfers=[SimpleNamespace(job_id=2, end_event=first)])
    assert worker.submit_load(2, *load)
    assert worker.submit_load(3, *load), "of which the worker says nothing"
    worker._expedited_load_handler = SimpleNamespace(
        _transfers=[SimpleNamespace(job_id=3, end_event=first), SimpleNamespace(job_id=4, end_event=second)]
    )
    assert worker.submit_load(4, *load)
    assert copies.ends == [None, first, None, second]


def test_with_files_below_nobody_says_where_a_copy_came_from(followed: Any) -> None:
    records, copies, worker = followed
    named = key(b"a", 0)._replace(path="/nowhere")
    records.follow(jobs(loads={2: [9]}), {9: named})
    worker.submit_load(2, tier([9]), device([20], [1], [0]))
    assert taken(copies) == {("full", 20): Taken(SIZE, ())}


def test_no_copy_waits_for_its_records() -> None:
    """They are taken while it is under way: on a GPU it is made beside the engine's thread."""
    records, order = OffloadRecords([], Copies(), Observer(), StoredCopies(dict, None), list), list[str]()  # type: ignore[arg-type]
    records._store = lambda *_: order.append("records")  # type: ignore[method-assign]
    records._load = lambda *_: order.append("records")  # type: ignore[method-assign]
    submit: Any = lambda *_: order.append("copy")  # noqa: E731
    worker = SimpleNamespace(submit_store=submit, submit_load=submit)
    spec = SimpleNamespace(blocks_per_chunk=1)
    records.wrap(MethodPatches(), SimpleNamespace(connector_worker=SimpleNamespace(spec=spec, worker=worker)))
    worker.submit_store(1, device([7], [1], [0]), tier([3]))
    order.append("forward")
    records.launched()
    worker.submit_load(2, tier([3]), device([7], [1], [0]))
    records.launched()
    assert order == ["copy", "forward", "records", "copy", "records"]


def test_what_is_stored_is_known_to_a_load_of_the_same_step(followed: Any) -> None:
    records, copies, worker = followed
    records.follow(jobs(stores={1: [3]}, loads={2: [3]}), {3: key(b"a", 0)})
    worker.submit_store(1, device([8], [1], [0]), tier([3]))
    records.launched()
    worker.submit_load(2, tier([3]), device([20], [1], [0]))
    assert taken(copies) == {("full", 20): Taken(SIZE, ((8, -8),), HOST_PEER)}


@pytest.mark.parametrize("written_before", [False, True])
def test_a_file_that_is_written_before_the_records_are_there_has_a_record_file(
    followed: Any, tmp_path: Path, written_before: bool
) -> None:
    """On a GPU they reach the host a step later. A file that was there before holds another copy."""
    records, _, worker = followed
    files = RecordFiles(None)
    records._stored = StoredCopies(dict, files)
    path = tmp_path / "a.bin"
    if written_before:
        path.touch()
    records.follow(jobs(stores={1: [3]}), {3: key(b"a", 0)._replace(path=str(path))})
    worker.submit_store(1, device([8], [1], [0]), tier([3]))
    path.touch()
    records.launched()
    files.close()
    assert (len(list(tmp_path.glob("*.kvcanary"))) == 0) is written_before


def test_a_store_that_cannot_be_followed_leaves_the_engine_alone(followed: Any) -> None:
    records, _, worker = followed
    worker.submit_store(1, None, None)
    faults = list[Exception]()
    records._observer.fault = lambda _, error: faults.append(error)
    records.follow(jobs(stores={2: [3]}), {3: key(b"a", 0)})
    worker.submit_store(2, None, None)
    records.launched()
    assert [type(error) for error in faults] == [AttributeError]


def test_records_that_are_not_complete_vouch_for_nothing(followed: Any) -> None:
    records, copies, worker = followed
    records.follow(jobs(stores={1: [3]}), {3: key(b"a", 0)})
    worker.submit_store(1, device([7], [1], [0]), tier([3]))
    records.follow(jobs(loads={2: [3]}), {3: key(b"a", 0)})
    worker.submit_load(2, tier([3]), device([20], [1], [0]))
    assert taken(copies) == {("full", 20): Taken(SIZE, (), HOST_PEER)}


def test_unknown_keys_and_groups_are_left_out(followed: Any) -> None:
    records, copies, worker = followed
    records.follow(jobs(stores={1: [3, 4]}, loads={2: [3, 4]}), {4: key(b"s", 5)})  # of states, say
    assert worker.submit_store(1, device([8, 6], [2], [0]), tier([3, 4]))
    assert worker.submit_load(2, tier([3, 4]), device([20, 21], [2], [0]))
    assert worker.submit_load(77, tier([3]), device([20], [1], [0])), "a job that was not announced"
    assert taken(copies) == {}


def test_metadata_within_metadata_is_found() -> None:
    inner = jobs()
    outer = SimpleNamespace(metadata=(object(), SimpleNamespace(metadata=(inner,))))
    output = SimpleNamespace(kv_connector_metadata=outer)
    setattr(output, KEYS_ATTRIBUTE, ({1: key(b"a", 0)},))
    assert list(jobs_of(output)) == [(inner, {1: key(b"a", 0)})]
    assert list(jobs_of(SimpleNamespace(kv_connector_metadata=None))) == []


FIRST = bytes(4)  # place in a chunk


def test_keys_of_what_is_stored_and_loaded_are_shown_by_group(followed: Any) -> None:
    records, _, worker = followed
    records.shown = True
    names = {3: key(b"a", 0), 4: key(b"b", 1)}
    records.follow(jobs(stores={1: [3, 4]}), names)
    worker.submit_store(1, device([8, 6], [1, 1], [0, 0]), tier([3, 4]))
    stored = [("stored", "0", {8: names[3].key + FIRST}), ("stored", "1", {6: names[4].key + FIRST})]
    assert records._observer.shown == stored, "before the forward that may fill the blocks anew"
    records.follow(jobs(loads={2: [3, 4]}), names)
    worker.submit_load(2, tier([3, 4]), device([20, 22], [1, 1], [0, 0]))
    loaded = [("loaded", "0", {20: names[3].key + FIRST}), ("loaded", "1", {22: names[4].key + FIRST})]
    assert records._observer.shown == stored + loaded


@pytest.mark.parametrize("way", ["stored", "loaded"])
def test_what_the_step_has_changed_is_shown_first(followed: Any, way: str) -> None:
    """Who holds a block, and since when, decides what was stored of it."""
    records, _, worker = followed
    records.shown, seen = True, records._observer.shown
    records._show_requests = lambda: seen.append(("requests", "", {}))
    named = {3: key(b"a", 0)}
    if way == "stored":
        records.follow(jobs(stores={1: [3]}), named)
        worker.submit_store(1, device([8], [1], [0]), tier([3]))
    else:
        records.follow(jobs(loads={1: [3]}), named)
        worker.submit_load(1, tier([3]), device([8], [1], [0]))
    assert [each for each, *_ in seen] == ["requests", way]


def test_who_may_load_damage_is_shown_without_a_key(followed: Any) -> None:
    """Block 7 has records that are not complete, so that nobody compares what is loaded."""
    records, _, worker = followed
    records.shown = True
    names = {3: key(b"a", 0), 4: key(b"b", 0)}
    records.follow(jobs(stores={1: [3, 4]}), names)
    worker.submit_store(1, device([7, 8], [2], [0]), tier([3, 4]))
    records.follow(jobs(loads={2: [3, 4]}), names)
    worker.submit_load(2, tier([3, 4]), device([20, 21], [2], [0]))
    assert records._observer.shown[1:] == [("loaded", "0", {20: b"", 21: names[4].key + FIRST})]


def test_blocks_without_keys_are_shown_as_unknown(followed: Any) -> None:
    records, _, worker = followed
    records.shown = True
    records.follow(jobs(stores={1: [3, 4]}, loads={2: [3, 4]}), {3: key(b"a", 0)})
    worker.submit_store(1, device([8, 6], [2], [0]), tier([3, 4]))
    worker.submit_load(2, tier([3, 4]), device([20, 21], [2], [0]))
    worker.submit_load(9, tier([3]), device([22], [1], [0]))
    assert records._observer.shown == [
        *(("stored", name, {6: b""}) for name in "01"),
        *(("loaded", name, {20: b"", 21: b""}) for name in "01"),
        *(("loaded", name, {22: b""}) for name in "01"),
    ]  # fmt: skip


def test_only_what_one_rank_keeps_in_memory_is_followed() -> None:
    spec: Any = type("Spec", (), {"get_manager": None})
    manager: Any = lambda _: None  # noqa: E731
    manager.__module__ = "vllm.v1.kv_offload.cpu.spec"
    spec.get_manager = manager
    config = SimpleNamespace(kv_cache_groups=[0, 1])
    made = {"spec": spec(), "kv_cache_config": config, "_is_store_writer": True}
    assert is_followed(SimpleNamespace(**made), (0, 1))
    assert not is_followed(SimpleNamespace(**made), (0,)), "as with states, whose blocks are not shown"
    assert not is_followed(SimpleNamespace(**made | {"_is_store_writer": False}), (0, 1))
    assert not is_followed(SimpleNamespace(spec=spec()), (0, 1))
    made["spec"].secondary_tier_configs = [{"type": "fs"}]
    assert not is_followed(SimpleNamespace(**made), (0, 1))
    spec.secondary_tier_configs = ()
    manager.__module__ = "ours"
    assert not is_followed(SimpleNamespace(**made | {"spec": spec()}), (0, 1))


def test_what_is_stored_of_states_is_one_record_each() -> None:
    asked = list[tuple[list[list[int]], bool]]()

    class OfStates(Observer):
        def block_folds(self, group: str, slots: torch.Tensor, *, baselines: bool = False) -> torch.Tensor:
            asked.append((slots.tolist(), baselines))
            return super().block_folds(group, slots * SIZE)

    for states, size in ((True, 1), (False, 2)):
        group: Any = SimpleNamespace(block_slots=size, view=SimpleNamespace(name="one"), states=states)
        assert folds_of([3, 5], group, OfStates()) is not None
    assert asked == [([[3], [5]], True), ([[6, 7], [10, 11]], False)]
