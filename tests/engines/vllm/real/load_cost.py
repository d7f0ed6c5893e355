"""What following an OffloadingConnector costs on a CPU: `python -m tests.engines.vllm.real.load_cost`.

Each round serves a prompt, gives its blocks to others, and loads them again. Printed, as JSON: thread time
per block of vLLM's own submissions, whose copies are made at once here, and of each part of the canary.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROUNDS = 20
WARM = 2


class Clock:
    """Thread time of the methods that it wraps; what a wrapped method inside takes is not its own."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.blocks: Counter[str] = Counter()
        self._inner = [0.0]

    def wrap(self, owner: Any, name: str, path: str, part: str) -> None:
        """Count the time of this method to a part of `path` ("store" or "load")."""
        original = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            started = time.thread_time()
            try:
                return original(*args, **kwargs)
            finally:
                spent = time.thread_time() - started
                self.seconds[f"{path}: {part}"] += spent - self._inner.pop()
                self._inner[-1] += spent
                if part == "vLLM":
                    device = args[1] if path == "store" else args[2]
                    self.blocks[path] += len(device.block_ids)

        setattr(owner, name, timed)


def measure(rounds: int = ROUNDS) -> dict[str, Any]:
    """Microseconds of thread time per block."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from canary_obs.engines.vllm.offload_records import OffloadRecords
    from canary_obs.runtime.loads import Loads
    from tests.engines.vllm.real.models import make_model
    from tests.engines.vllm.real.offloading import PROMPT, Tiers

    clock = Clock()
    clock.wrap(OffloadRecords, "_store", "store", "records of its blocks")
    clock.wrap(OffloadRecords, "_load", "load", "records of its copy")
    clock.wrap(Loads, "begin", "load", "what lay there before")
    clock.wrap(Loads, "end", "load", "judged")
    with TemporaryDirectory() as folder:
        tiers = Tiers(make_model(Path(folder), "llama"), Path(folder) / "tier")
        worker = get_kv_transfer_group().connector_worker.worker
        for path in ("store", "load"):
            # Below the canary's wrapper: its own `original` is what the worker's class has.
            handler = getattr(worker, f"_{path}_handler")
            clock.wrap(handler, "transfer_async", path, "vLLM")
        for number in range(WARM + rounds):
            if number == WARM:
                clock.seconds.clear()
                clock.blocks.clear()
            tiers.rig.generate([PROMPT], 2)
            tiers.forget()
        compared, left_out = tiers.loads()
        tiers.rig.close()
    found = {
        name: round(seconds / clock.blocks[name.partition(":")[0]] * 1e6, 1)
        for name, seconds in sorted(clock.seconds.items())
    }
    return {"blocks": dict(clock.blocks), "compared": compared, "left out": left_out, "us per block": found}


if __name__ == "__main__":
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_CI_ENV="1", VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1",
        VLLM_ENABLE_V1_MULTIPROCESSING="0", KV_CANARY_MODE="log", KV_CANARY_ENDPOINT="inproc",
    )  # fmt: skip
    json.dump(measure(), sys.stdout, indent=1)
    print()
