"""OffloadingConnector with states beside attention: a state that it loads is followed from then on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

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


def test_loaded_states_are_sound_and_damage_in_them_is_found(
    models: Callable[[str], Path], tmp_path: Path
) -> None:
    how = {name: value for name, value in STATES.items() if name != "num_gpu_blocks_override"}
    tiers = Tiers(models("falcon_h1"), tmp_path, **how)
    rig = tiers.rig
    try:
        asked = prompts(6, shared=280, groups=2)
        first = rig.generate(asked, 12)
        for memory in (False, True):
            tiers.settle()
            tiers.forget(memory=memory)
            assert not loaded_states(rig)
            assert rig.generate(asked, 12) == first
            assert rig.settle() == []
            assert loaded_states(rig)
        assert tiers.loads_by_group()["full"][0] > 1000
        assert rig.canary.verdict() == (State.OK, ())
        block = loaded_states(rig)[-1]
        flip(tensor(rig, 0, Part.V)[block])
        assert found_in(rig, {block}) == {(Phase.PATROL, Reason.KV_DATA), (Phase.SWEEP, Reason.KV_DATA)}
    finally:
        rig.close()
