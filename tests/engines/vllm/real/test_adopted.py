"""Blocks that vLLM had cached before the canary came: V1, in this process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.engines.vllm.real.adopted import tried
from tests.engines.vllm.real.rig import Rig
from tests.unchecked import Report


@pytest.fixture(scope="module")
def rig(models: Any) -> Iterator[Rig]:
    made = Rig(models("llama"))
    yield made
    made.close()


def report_adopted(engine: str, found: dict[str, dict[str, Any]], unchecked: Report) -> None:
    assert len(found) == 3
    for way, seen in found.items():
        verdict = (seen["state"], seen["reasons"])
        unchecked(way, engine, verdict, names=seen["names"], seconds=seen["seconds"])
        assert (seen["after"], seen["left"]) == ("ok", 0), way
        assert seen["damage"] == ["kv_data"], "later damage of a slot with a baseline is seen"


def test_slots_without_a_history(rig: Rig, unchecked: Report) -> None:
    report_adopted("vLLM V1", tried(rig), unchecked)
