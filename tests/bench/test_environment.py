"""What a result was measured on."""

from __future__ import annotations

import pytest

from canary_obs.bench import environment as module
from canary_obs.bench.environment import environment


def test_commit_machine_versions_and_time() -> None:
    facts = environment()
    assert {"commit", "canary_obs", "torch", "python", "cpu", "device", "time"} <= facts.keys()
    assert all(isinstance(value, str) and value for value in facts.values())


def test_the_commit_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CANARY_OBS_COMMIT", "v1.2-3-gabc")
    assert environment()["commit"] == "v1.2-3-gabc"


def test_without_git_the_commit_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> None:
        raise FileNotFoundError("git")

    monkeypatch.delenv("CANARY_OBS_COMMIT", raising=False)
    monkeypatch.setattr(module.subprocess, "run", missing)
    assert environment()["commit"] == "unknown"
