"""Groups whose blocks have fewer slots than tokens: states."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from canary_obs.engine_api.views import GroupView
from canary_obs.engines.vllm.adapter import VllmAdapter
from canary_obs.engines.vllm.groups import VllmGroup


def group(name: str, **more: Any) -> VllmGroup:
    view = GroupView(name=name, num_slots=64, page_size=1, sources=())
    return VllmGroup(number=0, num_blocks=8, block_size=32, view=view, layers=("a",), **more)


TOKENS, STATES = group("full"), group("state", states=True)


@pytest.mark.parametrize(("own", "slots"), [(TOKENS, [*range(64, 128)]), (STATES, [2, 3])])
def test_a_requests_slots_are_those_of_its_blocks(own: VllmGroup, slots: list[int]) -> None:
    adapter: Any = SimpleNamespace(
        _by_name={"own": own}, request_blocks=lambda _: iter([("r", [0, 3, 2]), ("s", [5])])
    )
    assert VllmAdapter.request_slots(adapter, "own", "r").tolist() == slots
    assert VllmAdapter.request_slots(adapter, "own", "t").tolist() == []
