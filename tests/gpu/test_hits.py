"""Prefix hits and copies on a GPU: damage is seen in the step that reads it; nothing waits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from canary_kernels import layout
from canary_obs.reference_engine.scheduling.request import Sampling
from canary_obs.runtime import first_reads
from canary_obs.runtime.device.byte_address import locate_byte
from canary_obs.vocabulary import State
from tests.gpu.rig import Rig, make_rig, waits_refused

QUIET = {"verify_on_hit": True, "idle_sweep": False, "patrol_budget": "off", "busy_sweep": False}
KV_DATA = layout.lane(layout.Phase.HIT, layout.Reason.KV_DATA)


def ask(rig: Rig) -> None:
    rig.engine.add_request(np.arange(60, dtype=np.int32) + 5, Sampling(max_tokens=2))
    while rig.engine.has_work():
        rig.engine.step()


@pytest.mark.parametrize("chunk", [32768, 7])
@pytest.mark.parametrize("model", ["llama", "swa", "mla", "speculative"])
def test_damage_of_a_hit_is_seen(model: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a small chunk, more uploads are under way at once than the ring has rows."""
    monkeypatch.setattr(first_reads, "_CHUNK", chunk)
    rig = make_rig(model=model, **QUIET)
    ask(rig)
    hits: dict[str, torch.Tensor] = {}
    hit = rig.canary.hit

    def noted(name: str, slots: torch.Tensor) -> None:
        hits[name] = slots
        with waits_refused():
            hit(name, slots)

    monkeypatch.setattr(rig.canary, "hit", noted)
    ask(rig)
    torch.cuda.synchronize()
    assert all(int(group.buffers.counters[KV_DATA]) == 0 for group in rig.canary.state.groups)
    for name, slots in hits.items():
        group = rig.canary.state.by_name[name]
        assert int(group.buffers.counters[layout.COUNT_HASHED + layout.Phase.HIT]) == len(slots)
        locate_byte(group.view.sources[-1], int(slots[-1]), 0).flip(4)
    ask(rig)
    torch.cuda.synchronize()
    for name in hits:
        assert int(rig.canary.state.by_name[name].buffers.counters[KV_DATA]) == 1
    rig.canary.delivery.drain(5.0)
    assert rig.canary.verdict()[0] is State.VIOLATED
    assert rig.canary.health.faults.total() == 0


def test_clean_traffic_owes_nothing() -> None:
    rig = make_rig(sweep_interval=25, verify_on_hit=True)
    rig.run(300)
    rig.canary.check_everything()
    assert rig.canary.verdict() == (State.OK, ())
    full = rig.canary.state.by_name["full"].buffers.counters
    assert int(full[layout.COUNT_HASHED + layout.Phase.HIT]) == rig.engine.statistics.prefix_hit_tokens > 0
