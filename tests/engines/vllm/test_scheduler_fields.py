"""What the adapter reads of vLLM's scheduler data is there in each version whose names were recorded."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from canary_obs.engines.vllm import versions
from canary_obs.engines.vllm.versions import FIELDS

RECORDED: dict[str, dict[str, list[str]]] = json.loads(
    Path(__file__).with_name("scheduler_fields.json").read_text("utf-8")
)
# As the adapter calls what it reads: the name of the variable, and whose fields these are.
OUTPUT, NEW, CACHED = (
    f"vllm.v1.core.sched.output:{name}" for name in ("SchedulerOutput", "NewRequestData", "CachedRequestData")
)
CALLED = {"output": OUTPUT, "scheduler_output": OUTPUT, "new": NEW, "cached": CACHED}
# Outputs of other kinds that are called so, too, a field that the rehearsal sets, and what holds our own.
OTHERS = {"store_spec", "keys_to_store", "num_common_prefix_blocks", "__dict__"}


@pytest.mark.parametrize("version", RECORDED)
def test_every_field_is_there(version: str) -> None:
    missing = {path: FIELDS[path] - set(names) for path, names in RECORDED[version].items()}
    assert missing == dict.fromkeys(FIELDS, frozenset())


def test_every_field_that_is_read_is_listed() -> None:
    """One that is not would be missed by the tool that tries new versions, and by the test above."""
    read: dict[str, set[str]] = {path: set() for path in FIELDS}
    for file in Path(versions.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                read.get(CALLED.get(node.value.id, ""), set()).add(node.attr)
    read[OUTPUT] -= OTHERS
    assert {path: names - FIELDS[path] for path, names in read.items()} == {path: set() for path in FIELDS}
