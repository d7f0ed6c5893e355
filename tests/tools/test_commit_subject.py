"""The commit-msg hook, and the hooks that pre-commit runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tools/commit_subject.py"


@pytest.mark.parametrize(
    ("message", "refused"),
    [
        ("x" * 72, ""),
        ("Add a reason\n\nBecause.", ""),
        ("Add a reason\n# a comment of git", ""),
        ("x" * 73, "73 characters; 72 are allowed"),
        ("\n\nlate subject", "empty"),
        ("", "empty"),
        ("Add a reason\nbecause", "must be empty"),
    ],
)
def test_a_long_or_missing_subject_is_refused(tmp_path: Path, message: str, refused: str) -> None:
    file = tmp_path / "COMMIT_EDITMSG"
    file.write_text(message)
    done = subprocess.run([sys.executable, SCRIPT, file], capture_output=True, text=True, check=False)
    assert done.returncode == (1 if refused else 0)
    assert refused in done.stderr


def test_every_hook_runs_a_tool_of_the_environment() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    (repository,) = config["repos"]
    assert repository["repo"] == "local"
    entries = {hook["id"]: hook["entry"].split() for hook in repository["hooks"]}
    assert set(entries) == {"ruff-check", "ruff-format", "mypy", "lint-imports", "commit-subject"}
    for program, *arguments in entries.values():
        assert program.startswith(".venv/bin/")
        assert all((ROOT / argument).exists() for argument in arguments if "/" in argument)
