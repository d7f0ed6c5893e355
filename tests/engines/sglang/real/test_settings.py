"""What SGLang makes of settings that users leave to it, or give by other names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from canary_obs.engines.sglang.settings import settings_of
from tests.engines.sglang.real.models import make_draft
from tests.engines.sglang.real.rig import DEFAULTS


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"attn_dp_size": 2, "tp_size": 2}, {"attn_dp_size": 2, "dp_size": 1}),
        ({"dp_size": 2, "enable_dp_attention": True, "tp_size": 2}, {"attn_dp_size": 2, "dp_size": 1}),
        (
            {"speculative_algorithm": "NEXTN", "disable_overlap_schedule": False},
            {"speculative_algorithm": "EAGLE", "disable_overlap_schedule": True, "speculative_eagle_topk": 4},
        ),
    ],
)
def test_what_sglang_decides_is_what_counts(
    models: Callable[[str], Path], given: dict[str, Any], found: dict[str, Any]
) -> None:
    from sglang.srt.server_args import ServerArgs

    model = models("llama")
    if "speculative_algorithm" in given:
        given = given | {"speculative_draft_model_path": str(make_draft(model.parent, "eagle"))}
    arguments = ServerArgs(model_path=str(model), **(DEFAULTS | given))
    arguments.resolve_once()
    settings = settings_of(SimpleNamespace(server_args=arguments))
    assert {name: getattr(settings, name) for name in found} == found
