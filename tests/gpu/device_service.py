"""The parts of a service that know GPUs, in a process of their own and without a web server.

`python -m tests.gpu.device_service` answers each line of its input with a line of JSON: `on` samples every
50 ms (the product: every 10 s), `off` ends that, `page` is the page of metrics.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import TracebackType

from canary_obs.config import ServiceConfig
from canary_obs.devices.sampler import DeviceSampler
from canary_obs.hub.hub import Hub
from canary_obs.telemetry.exposition import Exposition
from canary_obs.telemetry.prometheus import HubCollector

SECONDS = 0.05


class DeviceService:
    """That process, as its parent sees it."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.gpu.device_service"]
        root = Path(__file__).parents[2]
        self._process = subprocess.Popen(
            command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, command: str) -> str:
        """The answer to one command."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()
        return str(json.loads(self._process.stdout.readline()))

    def __enter__(self) -> DeviceService:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate(timeout=30)


class _Service:
    def __init__(self) -> None:
        self._sampler: DeviceSampler | None = None
        collector = HubCollector(
            Hub(ServiceConfig()), devices=lambda: self._sampler.latest() if self._sampler else ()
        )
        self._exposition = Exposition(collector)
        self._faults: list[Exception] = []

    def answer(self, command: str) -> str:
        if command == "page":
            return self._exposition.page("")[0].decode()
        if command == "on" and self._sampler is None:
            self._sampler = DeviceSampler(self._faults.append, interval=SECONDS)
            sampled = self._sampler.sampled.wait(60)
            return f"sampled: {sampled}, faults: {self._faults}"
        if command == "off" and self._sampler is not None:
            self._sampler.close()
            self._sampler = None
        return "on" if self._sampler else "off"


def main() -> None:
    service = _Service()
    for line in sys.stdin:
        print(json.dumps(service.answer(line.strip())), flush=True)
    service.answer("off")


if __name__ == "__main__":
    main()
