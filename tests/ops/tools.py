"""Command line tools that check our files."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_SECONDS = 900.0  # ends a tool that hangs: promtool took four minutes for a file of rules on loaded cores


def judge(tool: str, *arguments: str | Path, cwd: Path = ROOT, package: str = "") -> str:
    """Run a tool that must succeed; returns its output. Skips the test if the tool is not installed."""
    # Tools that pip installs are in the interpreter's folder.
    found = shutil.which(tool, path=str(Path(sys.executable).parent)) or shutil.which(tool)
    if found is None:
        pytest.skip(f"{tool} is NOT INSTALLED: apt-get install {package or tool}")
    command = [found, *map(str, arguments)]
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=_SECONDS, check=False)
    output = result.stdout + result.stderr
    assert result.returncode == 0, f"{' '.join(command)}\n{output}"
    return output
