"""KV_CANARY_SERVE=auto: rank 0 starts the service beside itself."""

from __future__ import annotations

import os
import subprocess
import sys

from canary_obs.config import IN_PROCESS, CanaryConfig

# The service must not outlive an engine that was killed: the kernel ends it with its parent thread.
_CHILD = (
    "import ctypes, signal, sys; ctypes.CDLL(None).prctl(1, signal.SIGTERM); "
    "from canary_obs.cli import main; main()"
)
_STOP_SECONDS = 10.0


def start_service(config: CanaryConfig) -> subprocess.Popen[bytes] | None:
    """The service as a child of this process where the settings ask for it; None elsewhere.

    Does not wait for it. A service that cannot start (port or endpoint taken) says so on standard error.
    """
    if config.serve != "auto" or config.rank != 0 or config.endpoint == IN_PROCESS:
        return None
    command = [sys.executable, "-c", _CHILD, "serve", "--endpoint", config.endpoint]
    # What the engine set up for itself (thread binding, preloads) is not the service's.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "LD_"))}
    return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)


def stop_service(process: subprocess.Popen[bytes]) -> None:
    """Ask it to end, insist after a while."""
    process.terminate()
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
