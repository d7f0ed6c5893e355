"""What a result was measured on: commit, machine, versions, time."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from pathlib import Path

import torch

from canary_obs import __version__


def environment() -> dict[str, str]:
    """One text per fact; those of a GPU (driver, cuda, triton) only where there is one."""
    facts = {
        "commit": _commit(),
        "canary_obs": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "cpu": f"{os.cpu_count()} x {_cpu_model()}",
        "device": platform.machine(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    if torch.cuda.is_available():
        import triton

        facts |= {
            "device": torch.cuda.get_device_name(),
            "driver": _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
            "cuda": str(torch.version.cuda),
            "triton": str(triton.__version__),
        }
    return facts


def _commit() -> str:
    """CANARY_OBS_COMMIT, or the commit of this checkout (`-dirty` if changed), or `unknown`."""
    if named := os.environ.get("CANARY_OBS_COMMIT"):
        return named
    git = "git", "-C", str(Path(__file__).parents[1])
    # An installed package may lie in the checkout of something else.
    if _first_line(*git, "ls-files", "--error-unmatch", "__init__.py") == "unknown":
        return "unknown"
    return _first_line(*git, "describe", "--always", "--dirty", "--abbrev=12")


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.machine())


def _first_line(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")[0]
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
