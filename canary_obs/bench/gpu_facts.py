"""What a GPU benchmark ran on."""

from __future__ import annotations

import platform
import subprocess
import time

import torch
import triton


def environment() -> dict[str, str]:
    """Device, driver, versions and time of a run on the current GPU."""
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split("\n")[0]
    except (OSError, subprocess.CalledProcessError):
        driver = "unknown"
    return {
        "device": torch.cuda.get_device_name(0),
        "driver": driver,
        "cuda": str(torch.version.cuda),
        "torch": str(torch.__version__),
        "triton": triton.__version__,
        "python": platform.python_version(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
