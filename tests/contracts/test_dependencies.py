"""What is installed with the package comes in versions that were tried, or are promised to be compatible."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))["project"]
RUNTIME = [
    *PROJECT["dependencies"],
    *(name for extra in ("engine", "serve") for name in PROJECT["optional-dependencies"][extra]),
]


@pytest.mark.parametrize("requirement", RUNTIME)
def test_a_runtime_dependency_has_both_bounds(requirement: str) -> None:
    versions = requirement.partition(";")[0]
    assert ">=" in versions, "a lower bound: the oldest version that works"
    assert ",<" in versions, "an upper bound: the next version that may break us"
