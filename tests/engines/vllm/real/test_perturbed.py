"""All modes of fault injection in a real vLLM (V1; V2: see test_v2): nothing is missed or unexplained."""

from __future__ import annotations

from typing import Any

from tests.engines.vllm.real import perturbed


def test_every_injection_is_accounted_for(make_rig: Any) -> None:
    perturbed.check(perturbed.tried(make_rig()))
