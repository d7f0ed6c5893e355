"""The records of a GPU's hierarchical cache, in an engine on a CPU.

SGLang 0.5.23 submits copies, where 0.5.16's controller has queues of them: here such queues are in front.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from canary_obs.engines.sglang import adapter, hierarchical_cache
from canary_obs.engines.sglang.hierarchical_cache import HierarchicalCache
from canary_obs.engines.toolkit.method_patches import MethodPatches
from canary_obs.vocabulary import Phase, Reason, State
from tests.engines.sglang.real.tiers import PROMPT, TIER, flip_in_host, install, push_out, tier
from tests.engines.sglang.real.traffic import storm


class Queues:
    """What SGLang 0.5.16's controller has, in front of 0.5.23's."""

    def __init__(self, controller: Any) -> None:
        self.engine = controller.l2_transfer_engine
        self.mem_pool_host = controller.mem_pool_host.anchor_entry.host_pool
        self.write_queue: list[Any] = []
        self.load_queue: list[Any] = []
        self.ack_load_queue: list[Any] = []
        self.submitted: Any = None

    def start_writing(self) -> None:
        copies, self.write_queue = self.write_queue, []
        self.submitted = self.out(copies)

    def start_loading(self) -> None:
        copies, self.load_queue = self.load_queue, []
        self.submitted = self.back(copies)
        self.ack_load_queue.append(SimpleNamespace(finish_event=SimpleNamespace(wait=lambda: None)))

    def wrap(self, patches: MethodPatches) -> None:
        """Have the newer controller's copies go through the queues."""
        patches.wrap(self.engine, "submit_device_to_host", self._around_out)
        patches.wrap(self.engine, "submit_host_to_device", self._around_back)

    def _around_out(self, original: Any) -> Any:
        def submit_device_to_host(copies: Sequence[Any]) -> Any:
            self.out = original
            self.write_queue += copies
            self.start_writing()
            return self.submitted

        return submit_device_to_host

    def _around_back(self, original: Any) -> Any:
        def submit_host_to_device(copies: Sequence[Any], **named: Any) -> Any:
            self.back = partial(original, **named)
            self.load_queue += copies
            self.start_loading()
            return self.submitted

        return submit_host_to_device


class InFront(HierarchicalCache):
    """Of a controller without queues."""

    def __init__(self, controller: Any, *given: Any) -> None:
        super().__init__(Queues(controller), *given)
        self._groups = {id(controller.mem_pool_host.anchor_entry.device_pool): "full"}

    def wrap(self, patches: MethodPatches) -> None:
        super().wrap(patches)
        self._controller.wrap(patches)


@pytest.fixture(autouse=True)
def _gpus_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    install()
    monkeypatch.setattr(adapter, "concurrent", lambda device: True)
    monkeypatch.setattr(adapter, "HierarchicalCache", InFront)
    monkeypatch.setattr(hierarchical_cache, "check_methods", lambda *_: None)


@pytest.mark.parametrize(("policy", "page_size"), [("write_through", 1), ("write_back", 16)])
def test_a_storm(make_rig: Any, policy: str, page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = TIER | {
        "hicache_write_policy": policy, "page_size": page_size, "disable_overlap_schedule": False,
    }  # fmt: skip
    rig = make_rig(**settings)
    rig.run(storm(rig, rounds=2))
    assert rig.settle() == []
    assert rig.canary.verdict() == (State.OK, ())
    assert isinstance(tier(rig), HierarchicalCache)
    slots = tier(rig)._controller.mem_pool_host.size
    assert rig.adapter.record_bytes == 32 * slots
    assert tier(rig).compared > 100
    assert tier(rig).without == 0
    assert not rig.canary.health.faults
    monkeypatch.setenv("KV_CANARY_MODE", "none")
    without = make_rig(**settings)
    without.run(storm(without, rounds=2))
    assert without.answers == rig.answers


def test_a_bit_flips_in_host_memory(make_rig: Any) -> None:
    rig = make_rig(**TIER)
    rig.generate(PROMPT)
    push_out(rig)
    assert rig.settle() == []
    flipped = flip_in_host(rig, "full")
    rig.generate({"again": PROMPT["kept"] + [7, 8]})
    found = rig.settle()
    assert {(item.reason, item.group) for item in found} == {(Reason.KV_DATA, "full")}
    assert found[0].phase is Phase.HEAD
    assert 0 < len({item.slot for item in found}) <= flipped
