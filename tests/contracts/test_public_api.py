"""The names that users import from canary_obs, and where their types come from."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import canary_obs

NAMES = {
    "install_canary", "serve", "CanaryConfig", "ServiceConfig", "Mode", "KVCacheViolation",
    "ConfigurationError", "UnsupportedEngine", "EngineAdapter", "PrefixCache", "Observer", "GroupView",
    "GroupStep", "StepView", "StepTypes", "CachedCount", "CachedSlots", "ComparedTables", "KVAllocation",
    "__version__",
}  # fmt: skip
STUB = Path(canary_obs.__file__).with_suffix(".pyi")


def test_the_names_are_these() -> None:
    assert sorted(canary_obs.__all__) == sorted(NAMES)


def test_every_name_resolves() -> None:
    for name in canary_obs.__all__:
        assert getattr(canary_obs, name) is not None
    with pytest.raises(AttributeError, match="it offers"):
        canary_obs.no_such_name  # noqa: B018


def test_the_stub_names_the_same_modules() -> None:
    body = ast.parse(STUB.read_text(encoding="utf-8")).body
    imported = {
        alias.name: node.module for node in body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    (offered,) = (node.value for node in body if isinstance(node, ast.Assign))
    assert imported == canary_obs._MODULES
    assert ast.literal_eval(offered) == canary_obs.__all__
