"""OffloadingConnector with states beside attention: a state that it loads is followed from then on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from vllm.distributed.kv_transfer import get_kv_transfer_group

from canary_kernels import layout
from canary_obs.vocabulary import Part, Phase, Reason, State
from tests.engines.vllm.real.offloading import Tiers
from tests.engines.vllm.real.rig import Rig, prompts
from tests.engines.vllm.real.test_left_out import STATES
from tests.engines.vllm.real.test_states import flip, found_in, tensor


def loaded_states(rig: Rig) -> list[int]:
    """Cached ones that were loaded, and not written since."""
    (group,) = (group for group in rig.canary.state.groups if group.name == "state")
    states = group.buffers.records[:, layout.IDENTITY] >> 32 & layout.STATE_MASK
    return [block for block in rig.idle_blocks(group=1) if states[block] == int(layout.RecordState.BASELINE)]


def in_memory(tiers: Tiers) -> None:
    """Every byte that the memory tier holds changes."""
    for rows in get_kv_transfer_group().connector_worker.worker._store_handler.dst_tensors:
        rows ^= 64


def in_files(tiers: Tiers) -> None:
    for file in tiers.files():
        file.write_bytes(bytes(byte ^ 64 for byte in file.read_bytes()))


def skipped(tiers: Tiers) -> None:
    tiers.copies.skip = True


def test_loaded_states_are_sound_and_damage_in_them_is_found(
    models: Callable[[str], Path], tmp_path: Path
) -> None:
    how = {name: value for name, value in STATES.items() if name != "num_gpu_blocks_override"}
    tiers = Tiers(models("falcon_h1"), tmp_path, **how)
    rig = tiers.rig
    try:
        asked = prompts(6, shared=280, groups=2)
        first, before = rig.generate(asked, 12), 0
        for memory in (False, True):
            tiers.settle()
            tiers.forget(memory=memory)
            assert not loaded_states(rig)
            assert rig.generate(asked, 12) == first
            assert rig.settle() == []
            assert loaded_states(rig)
            assert tiers.loads_by_group()["state"][0] > before
            before = tiers.loads_by_group()["state"][0]
        assert tiers.loads_by_group()["full"][0] > 1000
        assert tiers.loads_by_group()["state"][1] == 0
        assert rig.canary.verdict() == (State.OK, ())
        block = loaded_states(rig)[-1]
        flip(tensor(rig, 0, Part.V)[block])
        assert found_in(rig, {block}) == {(Phase.PATROL, Reason.KV_DATA), (Phase.SWEEP, Reason.KV_DATA)}
    finally:
        rig.close()


def test_a_stored_state_that_changes_is_found_when_it_is_loaded(
    models: Callable[[str], Path], tmp_path: Path
) -> None:
    how = {name: value for name, value in STATES.items() if name != "num_gpu_blocks_override"}
    tiers = Tiers(models("falcon_h1"), tmp_path, **how)
    asked = prompts(1, shared=300)
    try:
        for memory, change in ((False, in_memory), (True, in_files), (False, skipped)):
            tiers.forget(memory=True)
            for file in tmp_path.rglob("*.bin*"):
                file.unlink()
            tiers.rig.generate(asked, 2)
            tiers.settle()
            tiers.forget(memory=memory)
            tiers.rig.settle()
            tiers.rig.found.clear()
            change(tiers)
            tiers.rig.generate(asked, 2)
            tiers.rig.settle()
            tiers.copies.skip = False
            found = {(row.phase, row.reason) for row in tiers.rig.found if row.group == "state"}
            lost = change is skipped
            assert found >= {(Phase.HEAD, Reason.LOST_LOAD if lost else Reason.KV_DATA)}, change
    finally:
        tiers.rig.close()
