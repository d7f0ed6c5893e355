"""docs/reference_engine.md gives each kind of model the groups that its adapter shows."""

from __future__ import annotations

import re

import pytest

from canary_obs.engines.registry import adapter_for
from canary_obs.reference_engine.engine import Engine
from canary_obs.reference_engine.settings import MODELS, tiny, with_model
from tests.docs.test_documents import text_of


def groups_by_model() -> dict[str, list[str]]:
    """Groups of the second column by the models of the first."""
    under = text_of("docs/reference_engine.md").split("# Kinds of KV caches\n", 1)[1].split("\n#", 1)[0]
    found = {}
    for line in [line for line in under.splitlines() if line.startswith("| `")]:
        models, groups = (re.findall(r"`(\w+)`", cell) for cell in line.split("|")[1:3])
        found |= dict.fromkeys(models, sorted(groups))
    return found


@pytest.mark.parametrize("model", MODELS)
def test_the_groups_of_a_kind(model: str) -> None:
    adapter = adapter_for(Engine(with_model(tiny(), model)))
    assert sorted(group.name for group in adapter.groups) == groups_by_model()[model]
