"""SGLang's HTTP server with several scheduler processes, for tests over HTTP."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from tests.engines.vllm.real.server import Process

ROOT = Path(__file__).parents[4]
# Python runs this at each start: spawned processes need the stand-ins, too.
_AT_START = """
import importlib.abc, sys
class Before(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "sglang":
            sys.meta_path.remove(self)
            from tests.engines.sglang.real import stand_ins
            stand_ins.install()
sys.meta_path.insert(0, Before())
"""


def environment(folder: Path, canary: dict[str, str], ranks: int = 1) -> dict[str, str]:
    """Of an engine with so many tensor ranks whose processes find the stand-ins, by a file in this folder."""
    (folder / "sitecustomize.py").write_text(_AT_START, "utf-8")
    paths = [str(folder), str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    found = {"PYTHONPATH": os.pathsep.join(filter(None, paths))} | canary
    if ranks > 1:
        found["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(
            str(core % (os.cpu_count() or 1)) for core in range(ranks)
        )
    return found


def start_sglang(model: Path, folder: Path, port: int, canary: dict[str, str], **settings: Any) -> Process:
    """`python -m sglang.launch_server` with the tests' defaults; its log is `sglang.log` in the folder."""
    given = {
        "model-path": model, "host": "127.0.0.1", "port": port, "device": "cpu",
        "attention-backend": "torch_native", "sampling-backend": "pytorch", "dtype": "float32",
        "max-total-tokens": 4096, "max-running-requests": 8, "chunked-prefill-size": 128,
        "mem-fraction-static": 0.2, "random-seed": 1,
    } | {name.replace("_", "-"): value for name, value in settings.items()}  # fmt: skip
    command = [sys.executable, "-m", "sglang.launch_server", "--skip-tokenizer-init", "--disable-cuda-graph"]
    for name, value in given.items():
        command += [f"--{name}", str(value)]
    ranks = int(settings.get("tp_size", 1))
    return Process(command, environment(folder, canary, ranks), folder / "sglang.log")
