"""vLLM's OffloadingConnector: loads from memory and files are compared with records of what was stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from canary_kernels import layout
from canary_obs.engines.vllm.connector_reports import ConnectorReports
from canary_obs.engines.vllm.pool_events import Loaded
from canary_obs.runtime.device.byte_address import locate_byte
from canary_obs.vocabulary import Phase, Reason, State
from tests.engines.vllm.real.offloading import BLOCKS, PROMPT, Tiers
from tests.engines.vllm.real.rig import prompts

DATA, LOST = (Phase.HEAD, Reason.KV_DATA), (Phase.HEAD, Reason.LOST_LOAD)


@pytest.fixture(scope="module")
def tiers(models: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tiers]:
    made = Tiers(models("llama"), tmp_path_factory.mktemp("files"))
    yield made
    made.rig.close()


def nothing(tiers: Tiers) -> None:
    pass


def each_chunk(change: Callable[[Any], None]) -> Callable[[Tiers], None]:
    """Change the memory tier behind everybody's back."""

    def fault(tiers: Tiers) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        change(get_kv_transfer_group().connector_worker.worker._store_handler.dst_tensors[0])

    return fault


def flip(rows: Any) -> None:
    rows[:, 77] ^= 64


def exchange(rows: Any) -> None:
    rows[:] = rows.roll(1, 0)


def exchange_layer(rows: Any) -> None:
    """Each block gets one layer of another."""
    third = rows.shape[1] // 3
    rows[:, :third] = rows[:, :third].roll(1, 0)


def test_a_clean_storm_through_both_tiers(tiers: Tiers) -> None:
    asked = prompts(16)
    first = tiers.rig.generate(asked, 12)
    for memory in (False, True):
        tiers.settle()
        tiers.forget(memory=memory)
        assert tiers.rig.generate(asked, 12) == first
    compared, left_out = tiers.loads()
    assert compared > 1000
    assert left_out == 0
    assert tiers.rig.settle() == []
    assert tiers.rig.canary.verdict() == (State.OK, ())


@pytest.mark.parametrize("memory", [False, True])
def test_what_was_stored_is_what_is_loaded(tiers: Tiers, memory: bool) -> None:
    assert tiers.loaded(nothing, memory=memory) == set()
    assert (tiers.compared, tiers.left_out) == (BLOCKS * 32, 0)


@pytest.mark.parametrize("change", [flip, exchange, exchange_layer])
def test_a_changed_memory_tier_is_found(tiers: Tiers, change: Any) -> None:
    assert tiers.loaded(each_chunk(change)) == {DATA}


def test_a_load_that_copied_nothing_is_lost(tiers: Tiers) -> None:
    def skip(tiers: Tiers) -> None:
        tiers.copies.skip = True

    assert tiers.loaded(skip) == {LOST}


def test_what_a_load_writes_over_is_compared_before(tiers: Tiers) -> None:
    """Damage in a block that nobody holds or has cached: a load is the last that meets it."""
    source, damaged = tiers.rig.canary.state.groups[0].view.sources[0], list[int]()
    records, loads = tiers.rig.canary.state.groups[0].buffers.records, tiers.rig.adapter._block_changes.loads
    begin_step = loads.begin_step

    def plant(output: Any, events: Any, observer: Any) -> None:
        for event in events if not damaged else ():
            if isinstance(event, Loaded):
                slots = [32 * block + offset for block in event.blocks for offset in range(32)]
                states = records[slots, layout.IDENTITY] >> 32 & layout.STATE_MASK
                damaged.append(slots[states.tolist().index(layout.RecordState.COMPLETE)])
                locate_byte(source, damaged[0], 3).flip(64)
        begin_step(output, events, observer)

    def damage(tiers: Tiers) -> None:
        loads.begin_step = plant  # type: ignore[method-assign]

    try:
        assert tiers.loaded(damage) == {DATA}
    finally:
        del loads.begin_step
    assert [(row.slot, row.peer) for row in tiers.rig.found] == [(damaged[0], None)]
    *_, taint = tiers.rig.canary.taint.tracker.damages.values()
    names = tiers.rig.canary.taint.tracker.readers.lives.names
    read = {names[life] for life in taint.readings}
    assert (taint.row.slot, taint.cause) == (damaged[0], None)
    assert read
    assert names[-1] not in read  # for whom it was loaded


def test_what_was_computed_from_damage_may_be_loaded_again(tiers: Tiers) -> None:
    view, prompt = tiers.rig.canary.state.groups[0].view, prompts(1, seed=9)[0][:100]
    assert tiers.rig.llm.reset_prefix_cache()
    tiers.rig.generate([prompt], 2)
    tiers.rig.settle()
    with tiers.rig.adapter.hooks.lock:
        damaged = int(tiers.rig.adapter.prefix_cache.cached(view.name, unlocked_only=False).slots[0])
        locate_byte(view.sources[0], damaged, 3).flip(64)
    tiers.rig.generate([prompt + [5] * 64], 2)
    tiers.rig.settle()
    *_, taint = tiers.rig.canary.taint.tracker.damages.values()
    assert (taint.row.slot, taint.copied, taint.readings != {}) == (damaged, True, True)
    assert "OffloadingConnector" in str(taint.cause)


def changed_files(change: Callable[[bytes], bytes]) -> Callable[[Tiers], None]:
    def fault(tiers: Tiers) -> None:
        for file in tiers.files():
            file.write_bytes(change(file.read_bytes()))

    return fault


def test_a_byte_that_flips_in_a_file_is_found(tiers: Tiers) -> None:
    flipped = changed_files(lambda data: data[:7] + bytes([data[7] ^ 64]) + data[8:])
    assert tiers.loaded(flipped, memory=True) == {DATA}
    assert tiers.left_out == 0


@pytest.mark.parametrize("layers", [1, 3])
def test_files_that_change_places_are_found(tiers: Tiers, layers: int) -> None:
    """Whole files, or the layers in them; the tiny model has three."""

    def exchanged(tiers: Tiers) -> None:
        files = tiers.files()
        contents = [file.read_bytes() for file in files]
        for file, own, other in zip(files, contents, [*contents[1:], contents[0]], strict=True):
            cut = len(own) * layers // 3
            file.write_bytes(other[:cut] + own[cut:])

    assert tiers.loaded(exchanged, memory=True) == {DATA}


def test_a_truncated_file_is_computed_again(tiers: Tiers) -> None:
    assert tiers.loaded(changed_files(lambda data: data[:-512]), memory=True) == set()
    assert (tiers.compared, tiers.left_out) == (0, 0)


def record_files(tiers: Tiers) -> list[Path]:
    (records,) = reports(tiers).offloads
    found = [Path(records._stored.record_file_of(str(file))) for file in tiers.files()]
    assert found
    return found


def reports(tiers: Tiers) -> ConnectorReports:
    return tiers.rig.adapter.connector


def restarted(change: Callable[[Path], None]) -> Callable[[Tiers], None]:
    """The worker's memory of what it stored is lost, and something happens to the record files."""

    def fault(tiers: Tiers) -> None:
        for records in reports(tiers).offloads:
            records._stored._known.clear()
        for path in record_files(tiers):
            change(path)

    return fault


def test_records_outlive_the_process_beside_the_files(tiers: Tiers) -> None:
    assert tiers.loaded(restarted(lambda _: None), memory=True) == set()
    assert (tiers.compared, tiers.left_out) == (BLOCKS * 32, 0)


def test_without_its_record_file_a_load_is_unverified(tiers: Tiers) -> None:
    assert tiers.loaded(restarted(Path.unlink), memory=True) == set()
    assert (tiers.compared, tiers.left_out) == (0, BLOCKS * 32)


def test_a_forged_record_file_is_refused(tiers: Tiers) -> None:
    def forge(path: Path) -> None:
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))

    before = reports(tiers).record_files.refused
    assert tiers.loaded(restarted(forge), memory=True) == set()
    assert (tiers.compared, tiers.left_out) == (0, BLOCKS * 32)
    assert reports(tiers).record_files.refused == before + BLOCKS


def test_a_stale_record_file_accuses_the_copy(tiers: Tiers) -> None:
    """The file was replaced; its record file still says of the one before."""

    def replaced(tiers: Tiers) -> None:
        restarted(lambda _: None)(tiers)
        changed_files(lambda data: bytes(len(data)))(tiers)

    assert tiers.loaded(replaced, memory=True) == {DATA}


def test_bytes_that_arrive_when_the_blocks_belong_to_others_are_found(tiers: Tiers) -> None:
    def late(tiers: Tiers) -> None:
        tiers.copies.late = []
        tiers.rig.generate([PROMPT], 2)  # reported complete, and nothing came
        assert set(tiers.rig.reasons()) == {LOST} or tiers.rig.settle()
        pending, tiers.copies.late = tiers.copies.late, None
        assert pending
        assert tiers.rig.llm.reset_prefix_cache()
        tiers.rig.generate(prompts(8, seed=9), 2)
        tiers.rig.settle()
        tiers.rig.found.clear()
        tiers.copies.late = pending
        tiers.copies.arrive()

    assert (Phase.PATROL, Reason.KV_DATA) in tiers.loaded(late)
