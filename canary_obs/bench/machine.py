"""What figures were measured on."""

from __future__ import annotations

import platform
import subprocess
import time

import torch


def machine() -> dict[str, str]:
    """Device, driver and versions, as text."""
    found = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": platform.machine(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    if torch.cuda.is_available():
        import triton

        found |= {
            "device": torch.cuda.get_device_name(),
            "driver": _driver(),
            "cuda": str(torch.version.cuda),
            "triton": triton.__version__,
        }
    return found


def _driver() -> str:
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split("\n")[0]
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
