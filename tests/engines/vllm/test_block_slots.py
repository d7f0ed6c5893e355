"""Groups whose blocks have fewer slots than tokens: states, and compressed entries."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from canary_obs.engine_api.views import GroupView
from canary_obs.engines.vllm.adapter import VllmAdapter
from canary_obs.engines.vllm.groups import VllmGroup
from canary_obs.engines.vllm.heal_link import HEALS_ATTRIBUTE, HealLink
from canary_obs.engines.vllm.rehearsal import slots_of_request, slots_written
from canary_obs.healing.messages import HealsMessage
from canary_obs.heals import HealStatus
from canary_obs.records import Violation
from canary_obs.vocabulary import HealPolicy, Part, Phase, Reason


def group(name: str, **more: Any) -> VllmGroup:
    view = GroupView(name=name, num_slots=64, page_size=1, sources=())
    return VllmGroup(number=0, num_blocks=8, block_size=32, view=view, layers=("a",), **more)


CPU = torch.device("cpu")
TOKENS, STATES, ENTRIES = group("full"), group("state", states=True), group("c8", entry_tokens=8)


@pytest.mark.parametrize(
    ("own", "slots"), [(TOKENS, [*range(64, 128)]), (STATES, [2, 3]), (ENTRIES, [*range(8, 16)])]
)
def test_a_requests_slots_are_those_of_its_blocks(own: VllmGroup, slots: list[int]) -> None:
    adapter: Any = SimpleNamespace(
        _by_name={"own": own}, request_blocks=lambda _: iter([("r", [0, 3, 2]), ("s", [5])])
    )
    assert VllmAdapter.request_slots(adapter, "own", "r").tolist() == slots
    assert VllmAdapter.request_slots(adapter, "own", "t").tolist() == []


@pytest.mark.parametrize(("own", "offset"), [(TOKENS, 13), (ENTRIES, 15)])
def test_damage_of_an_entry_is_where_its_last_token_is(own: VllmGroup, offset: int) -> None:
    forwards: Any = SimpleNamespace(number=9)
    link, added = HealLink({own.view.name: own}, forwards, None, CPU), []
    link._outbox = SimpleNamespace(add=added.append)  # type: ignore[assignment]
    violation = Violation(
        step=4, phase=Phase.PATROL, group=own.view.name, part=Part.K, reason=Reason.KV_DATA,
        slot=3 * own.block_slots + 13 // own.entry_tokens, position=0, request=None, expected="1",
        actual="2", event=1, lag_steps=0, time_ns=0,
    )  # fmt: skip
    link.damaged([violation], "incident", 4)
    (damage,) = added
    assert (damage.block, damage.offset) == (3, offset)


def test_records_of_blocks_that_healing_leaves_to_nobody_are_emptied() -> None:
    groups = {"full": TOKENS, "state": STATES, "c8": ENTRIES, "window": replace(group("window"), number=1)}
    link = HealLink(groups, SimpleNamespace(number=9), None, CPU)  # type: ignore[arg-type]
    compared: dict[str, list[int]] = {}
    emptied: dict[str, list[int]] = {}

    def invalidated(name: str, slots: torch.Tensor) -> None:
        assert compared[name] == slots.tolist()  # other damage there may not be found yet
        emptied[name] = slots.tolist()

    observer: Any = SimpleNamespace(
        before_load=lambda name, slots: compared.update({name: slots.tolist()}), invalidated=invalidated
    )
    message = HealsMessage(
        (), HealStatus(policy=HealPolicy.OFF, effective=HealPolicy.OFF), ((0, 0), (0, 2), (1, 1))
    )
    link.note(SimpleNamespace(), observer)
    assert not emptied
    link.note(SimpleNamespace(**{HEALS_ATTRIBUTE: message}), observer)
    assert emptied == {
        "full": [*range(64, 96)],
        "c8": [8, 9, 10, 11],
        "window": [*range(32, 64)],
    }  # not the null block


@pytest.mark.parametrize(
    ("own", "slots", "written"),
    [
        (TOKENS, [*range(64, 72)], 7),
        (STATES, [2], 1),
        (group("state", states=True, state_tokens=4), [3], 1),
        (group("c4", entry_tokens=4), [16, 17], 1),
        (ENTRIES, [8], 0),
    ],
)
def test_a_rehearsal_looks_where_its_request_writes(own: VllmGroup, slots: list[int], written: int) -> None:
    assert slots_of_request(own, [2, 3]) == slots
    assert slots_written(own) == written
