"""An engine process of the end-to-end test: reference engines on GPUs that a fake driver names.

`python -m tests.fleet.engine_process ENDPOINT INSTANCE UUID ... [--flip UUID]` serves until its input ends.
"""

from __future__ import annotations

import argparse
import sys
import threading

from canary_obs.attach import install_canary
from canary_obs.config import CanaryConfig
from canary_obs.devices import nvml
from canary_obs.reference_engine import settings
from canary_obs.reference_engine.engine import Engine
from canary_obs.reference_engine.traffic import Traffic, scaled_traffic
from canary_obs.runtime.report import reporter
from tests.devices.fake_nvml import FakeDriver, FakeGpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("endpoint")
    parser.add_argument("instance")
    parser.add_argument("uuids", nargs="+")
    parser.add_argument("--flip", default="")
    arguments = parser.parse_args()
    gpus = [FakeGpu(uuid, f"00000000:{16 + i:02X}:00.0") for i, uuid in enumerate(arguments.uuids)]
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    engines = []
    for rank, uuid in enumerate(arguments.uuids):
        # The engine is on a CPU; the identity comes the way it would for the GPU of this UUID.
        reporter.read_identity = lambda device, uuid=uuid: nvml.find_identity(uuid.removeprefix("GPU-"), "")
        faulty = uuid == arguments.flip
        config = CanaryConfig(
            endpoint=arguments.endpoint, instance=arguments.instance, rank=rank, backend="torch",
            perturb="real_kv_used=0.05" if faulty else "", perturb_enabled=faulty, perturb_seed=rank,
        )  # fmt: skip
        engine = Engine(settings.tiny(seed=3))
        with FakeDriver(gpus).installed():
            canary = install_canary(engine, config)
        assert canary is not None
        canary.mark_ready()
        engines.append(
            (engine, Traffic(scaled_traffic(engine.config.max_context, engine.config.max_running), rank))
        )
    print("ready", flush=True)
    while not ended.is_set():
        for engine, traffic in engines:
            traffic.advance(engine)
            if engine.has_work():
                engine.step()


if __name__ == "__main__":
    main()
