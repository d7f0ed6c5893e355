"""Records beside host slots and stored pages. The controller's parts here have what SGLang's have of that."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from canary_kernels import layout
from canary_obs.engines.sglang.host_tier import HostTier, host_controller
from canary_obs.engines.toolkit.method_patches import MethodPatches

_PAGE = 2


class Observer:
    """Records are the slot's number in every word; those of slot 0 cannot be had."""

    def __init__(self) -> None:
        self.received_slots: list[tuple[list[int], list[int] | None]] = []
        self.before: list[list[int]] = []  # compared before something was written over them
        self.awaiting: list[list[int]] = []  # before something arrived
        self.faults: list[str] = []

    def records_of(self, group: str, slots: Tensor) -> Tensor | None:
        assert group in ("full", "draft")
        return None if bool((slots == 0).any()) else slots[:, None].repeat(1, layout.RECORD_WORDS)

    def received(
        self, group: str, slots: Tensor, records: Tensor | None = None, peer: str = "", request: str = ""
    ) -> None:
        assert group in ("full", "draft")
        self.received_slots.append((slots.tolist(), None if records is None else records[:, 0].tolist()))

    def before_load(self, group: str, slots: Tensor) -> None:
        assert self.received_slots == []
        self.before.append(slots.tolist())

    def awaited(self, group: str, slots: Tensor) -> None:
        assert self.received_slots == []
        self.awaiting.append(slots.tolist())

    def fault(self, part: str, error: Exception) -> None:
        self.faults.append(f"{part}: {error}")


class HostPool(SimpleNamespace):
    logical_size = 8

    def alloc(self, count: int) -> Tensor | None:
        return torch.arange(count)


class Transfers(SimpleNamespace):
    def submit_device_to_host(self, transfers: Any) -> str:
        return "done"

    def submit_host_to_device(self, transfers: Any, *, transfer_layer_id_max: int) -> str:
        return "done"


class Storage:
    def __init__(self) -> None:
        self.keys: set[str] = set()

    def exists(self, key: str) -> bool:
        return key in self.keys


class Rig:
    """A tier over one host pool and one device pool; drafts have some of their own, or are packed."""

    def __init__(self, *, packed: bool = False) -> None:
        self.observer, self.storage = Observer(), Storage()
        self.host, self.device = HostPool(), SimpleNamespace()
        entry = SimpleNamespace(host_pool=self.host, device_pool=self.device)
        other = SimpleNamespace(host_pool=HostPool(), device_pool=SimpleNamespace())
        self.draft = SimpleNamespace(host_pool=HostPool(), device_pool=SimpleNamespace())
        entries = {"kv": entry, "mamba": other, "draft": self.draft}
        if packed:
            entry.packed_draft_device_pools = (entries.pop("draft").device_pool,)
        self.controller: Any = SimpleNamespace(
            l2_transfer_engine=Transfers(), storage_backend=self.storage, page_size=_PAGE,
            mem_pool_host=SimpleNamespace(entry_map=entries),
            page_set_func=self._set, page_get_func=lambda operation, keys, slots, extra: len(keys),
        )  # fmt: skip
        self.patches = MethodPatches()
        pools = {"draft": self.draft.device_pool, "full": self.device}
        self.tier = HostTier(self.controller, pools, self.observer)  # type: ignore[arg-type]
        self.tier.wrap(self.patches)

    def _set(self, keys: list[str], slots: Tensor, extra: Any) -> bool:
        self.storage.keys |= set(keys)
        return True

    def transfer(self, host: list[int], device: list[int], drafts: bool = False) -> list[Any]:
        """SGLang moves a draft model's KV in the same transfer, between slots of the same numbers."""
        pools = [(self.host, self.device), (self.draft.host_pool, self.draft.device_pool)]
        return [
            SimpleNamespace(
                host_pool=own_host, device_pool=own_device, host_indices=torch.tensor(host),
                device_indices=torch.tensor(device),
            )
            for own_host, own_device in pools[: 1 + drafts]
        ]  # fmt: skip

    def offload(self, host: list[int], device: list[int]) -> None:
        self.controller.l2_transfer_engine.submit_device_to_host(self.transfer(host, device))

    def load(self, host: list[int], device: list[int]) -> list[tuple[list[int], list[int] | None]]:
        self.observer.received_slots.clear()
        engine = self.controller.l2_transfer_engine
        engine.submit_host_to_device(self.transfer(host, device), transfer_layer_id_max=1)
        return self.observer.received_slots


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_records_come_back_with_what_they_were_sent_with(rig: Rig) -> None:
    rig.offload([2, 3], [21, 22])
    assert rig.load([3, 2, 4], [5, 6, 7]) == [([5, 6], [22, 21]), ([7], None)]
    assert (rig.observer.before, rig.observer.faults) == ([[5, 6, 7]], [])
    assert (rig.tier.compared, rig.tier.without) == (2, 1)


def test_a_host_slot_that_is_given_anew_has_no_record(rig: Rig) -> None:
    rig.offload([0, 1], [21, 22])
    rig.host.alloc(1)
    assert rig.load([0, 1], [5, 6]) == [([6], [22]), ([5], None)]


def test_a_draft_models_records_are_in_the_host_slots_of_the_targets(rig: Rig) -> None:
    """SGLang allocates only those: a record of their last content must not stay for either."""
    engine = rig.controller.l2_transfer_engine
    engine.submit_device_to_host(rig.transfer([0, 1], [21, 22], drafts=True))
    rig.host.alloc(1)
    engine.submit_host_to_device(rig.transfer([0, 1], [5, 6], drafts=True), transfer_layer_id_max=1)
    assert rig.observer.received_slots == [([6], [22]), ([5], None)] * 2
    assert (rig.observer.before, rig.observer.faults) == ([[5, 6]] * 2, [])
    assert "alloc" not in vars(rig.draft.host_pool)


def test_drafts_that_are_packed_leave_with_the_target_and_come_back_by_themselves() -> None:
    """SGLang's drafts for the next tokens (MTP): further layers of the target's host slots."""
    rig = Rig(packed=True)
    engine = rig.controller.l2_transfer_engine
    rig.offload([0, 1], [21, 22])
    rig.host.alloc(1)
    target, drafts = rig.transfer([0, 1], [5, 6], drafts=True)
    drafts.host_pool = rig.host
    engine.submit_host_to_device([target, drafts], transfer_layer_id_max=1)
    assert rig.observer.received_slots == [([6], [22]), ([5], None)] * 2
    assert (rig.observer.before, rig.observer.faults) == ([[5, 6]] * 2, [])
    rig.controller.page_set_func(["a"], torch.tensor([0, 1]), None)
    rig.controller.page_get_func(None, ["a"], torch.tensor([4, 5]), None)
    assert rig.tier._stored["a"][1].tolist() == rig.tier._stored["a"][0].tolist()
    target, drafts = rig.transfer([5], [7], drafts=True)
    rig.observer.received_slots.clear()
    engine.submit_host_to_device([target, drafts], transfer_layer_id_max=1)
    assert rig.observer.received_slots == [([7], [22])] * 2
    assert rig.observer.faults == []


def test_where_no_record_could_be_read_the_last_one_is_gone(rig: Rig) -> None:
    rig.offload([1], [21])
    rig.offload([1], [0])
    assert rig.load([1], [5]) == [([5], None)]


def test_pages_that_are_stored_keep_their_records(rig: Rig) -> None:
    rig.offload([0, 1], [21, 22])
    rig.controller.page_set_func(["a"], torch.tensor([0, 1]), None)
    rig.host.alloc(2)
    assert rig.controller.page_get_func(None, ["a", "b"], torch.tensor([4, 5, 6, 7]), None) == 2
    assert rig.load([4, 5, 6], [1, 2, 3]) == [([1, 2], [21, 22]), ([3], None)]


def test_a_page_that_the_storage_had_is_not_the_one_that_was_offered(rig: Rig) -> None:
    """Another computation's bytes may differ: comparing them would condemn sound ones."""
    rig.storage.keys.add("a")
    rig.offload([0, 1], [21, 22])
    rig.controller.page_set_func(["a"], torch.tensor([0, 1]), None)
    rig.controller.page_get_func(None, ["a"], torch.tensor([4, 5]), None)
    assert rig.load([4, 5], [1, 2]) == [([1, 2], None)]


def test_a_pool_of_no_group_is_left_alone(rig: Rig) -> None:
    other = SimpleNamespace(host_pool=HostPool(), device_pool=SimpleNamespace())
    rig.controller.l2_transfer_engine.submit_device_to_host([other])
    assert rig.observer.faults == []


def test_a_failure_is_the_canarys_alone(rig: Rig) -> None:
    rig.controller.l2_transfer_engine.submit_device_to_host(rig.transfer([99], [21]))
    (fault,) = rig.observer.faults
    assert fault.startswith("host_tier: ")


def test_what_could_not_be_followed_is_awaited(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its slots were emptied when they came free: by their records they were never written."""
    monkeypatch.setattr(rig.observer, "before_load", lambda *_: int("none"))
    assert rig.load([99], [21]) == []  # a host slot that is none
    assert rig.observer.awaiting == [[21]]
    assert len(rig.observer.faults) == 2


def test_nothing_is_left_when_it_is_undone(rig: Rig) -> None:
    rig.patches.restore()
    assert not vars(rig.host)
    assert not vars(rig.controller.l2_transfer_engine)
    assert rig.controller.page_set_func == rig._set


def test_which_scheduler_has_a_host_tier() -> None:
    tree = SimpleNamespace(cache_controller="its controller")
    controller = tree.cache_controller
    for enabled, role, expected in (
        (False, "null", None), (True, "null", controller), (False, "decode", controller),
        (False, "prefill", None),
    ):  # fmt: skip
        arguments = SimpleNamespace(enable_hierarchical_cache=enabled, disaggregation_mode=role)
        assert host_controller(SimpleNamespace(server_args=arguments, tree_cache=tree)) == expected
