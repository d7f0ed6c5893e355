"""A script that runs pytest in forks of itself, with everything imported that is slow and not ours.

Arguments: seconds per run, the file that gets what a run prints, and the name of its hypothesis profile.
Reads one JSON list of pytest's arguments per line and answers with pytest's exit code, a line each; null if
it did not end in time.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import sys
import traceback
from importlib import import_module
from importlib.metadata import entry_points
from typing import NoReturn

import hypothesis
import numba
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported, as tests/conftest.py has it

# Slow to import, not ours, and without threads that a fork would miss.
_IMPORTED = (
    "fastapi",
    "httpx",
    "msgspec.inspect",
    "numpy.typing",
    "opentelemetry.sdk.trace",
    "pdb",
    "prometheus_client",
    "safetensors.torch",
    "structlog",
    "triton",
    "typer.testing",
    "uvicorn",
    "zmq",
)
# Any example will do, not only the smallest; and nothing is remembered from one run to the next.
_SETTINGS = hypothesis.settings(
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
    database=None,
    derandomize=False,
    deadline=None,  # a slow example finds no defect
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)


def main(seconds: float, output: str, profile: str) -> None:
    """Answer until the input ends."""
    hypothesis.settings.register_profile(profile, _SETTINGS)
    for name in _IMPORTED:
        import_module(name)
    for plugin in entry_points(group="pytest11"):
        plugin.load()
    # numba sets itself up with the first function that it compiles, for a third of a second.
    numba.njit("int64(int64)")(lambda number: number)
    gc.collect()
    gc.freeze()  # pytest collects ten times when it ends; what all forks share is none of theirs
    for line in sys.stdin:
        child = os.fork()
        if not child:
            _run(json.loads(line), output)
        with open(os.pidfd_open(child)) as end:
            ended, _, _ = select.select([end], [], [], seconds)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # also what its tests left running
        _, status = os.waitpid(child, 0)
        print(json.dumps(os.waitstatus_to_exitcode(status) if ended else None), flush=True)


def _run(arguments: list[str], output: str) -> NoReturn:
    code = 70  # EX_SOFTWARE: not one of pytest's, so that it is not taken for a failed test
    try:
        os.setpgid(0, 0)
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for descriptor, number in ((nothing, 0), (file, 1), (file, 2)):
            os.dup2(descriptor, number)
        code = int(pytest.main(arguments))
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # noqa: BLE001 - the fork must not go on as its parent
        traceback.print_exc()
    os._exit(code)


if __name__ == "__main__":
    main(float(sys.argv[1]), *sys.argv[2:])
    os._exit(0)  # else Triton's bindings list on a page what they did not free
