"""What each door may load, seen in a fresh interpreter."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SERVICE_STRANGERS = {"torch", "triton", "canary_kernels", "numpy"}
ENGINE_STRANGERS = {"prometheus_client", "opentelemetry", "fastapi", "pydantic", "starlette"}


def loaded_after(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("statement", "strangers"),
    [
        ("import canary_obs.serve", SERVICE_STRANGERS),
        ("import canary_obs.attach, canary_obs.reference_engine.engine", ENGINE_STRANGERS),
        ("import canary_obs", SERVICE_STRANGERS | ENGINE_STRANGERS | {"zmq", "msgspec"}),
        ("import canary_obs.cli", SERVICE_STRANGERS | ENGINE_STRANGERS),
    ],
)
def test_a_door_loads_no_stranger(statement: str, strangers: set[str]) -> None:
    assert loaded_after(statement) & strangers == set()


def test_imports_of_the_tests_name_modules_that_exist() -> None:
    """Stages with an environment of their own collect their tests last, and a renamed module fails there."""
    root, named = Path(__file__).parents[2], re.compile(r"^ *from (tests[\w.]*) import ", re.MULTILINE)
    missing = [
        f"{path.relative_to(root)} {module}"
        for path in sorted((root / "tests").rglob("*.py"))
        for module in named.findall(path.read_text(encoding="utf-8"))
        if not (root / f"{module.replace('.', '/')}.py").exists()
        if not (root / module.replace(".", "/")).is_dir()
    ]
    assert missing == []
