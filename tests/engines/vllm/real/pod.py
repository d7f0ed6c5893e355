"""The pod of docker/kubernetes/base as processes: its commands, variables, mounts and probes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.engines.vllm.real.server import Process, call

ROOT = Path(__file__).parents[4]
# A tiny model on two CPU workers; `engine.args` in the chart.
CPU_ARGUMENTS = (
    "--dtype", "float32", "--enforce-eager", "--max-model-len", "512", "--block-size", "32",
    "--num-gpu-blocks-override", "200", "--max-num-seqs", "8", "--gpu-memory-utilization", "0.1",
    "--tensor-parallel-size", "2", "--host", "127.0.0.1",
)  # fmt: skip
# Compiled kernels of the machine are used again, or each run would compile them for ten seconds.
_LEFT_OUT = frozenset({"NUMBA_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"})


@dataclass(slots=True, kw_only=True)
class Pod:
    """Its containers, with their mounts below one folder and their ports on loopback."""

    folder: Path
    model: Path
    ports: Mapping[int, int]  # of the manifest -> here
    engine_env: Mapping[str, str] = field(default_factory=dict)  # canary.engineEnv of the chart
    service_env: Mapping[str, str] = field(default_factory=dict)
    processes: dict[str, Process] = field(default_factory=dict)

    def spec(self) -> dict[str, Any]:
        text = (ROOT / "docker/kubernetes/base/engine.yaml").read_text("utf-8")
        spec: dict[str, Any] = yaml.safe_load(text)["spec"]["template"]["spec"]
        return spec

    def container(self, name: str) -> dict[str, Any]:
        spec = self.spec()
        (found,) = [each for each in (*spec["initContainers"], *spec["containers"]) if each["name"] == name]
        return found

    def start(self) -> None:
        """The init container, then the others; each mount is a folder of its own."""
        for name in ("install-canary", "kv-canary", "engine"):
            for mount in self.container(name)["volumeMounts"]:
                self.path(mount["mountPath"]).mkdir(mode=0o700, parents=True, exist_ok=True)
        install = self.here(self.container("install-canary")["command"])
        done = subprocess.run(install, timeout=200, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        serve = [str(Path(sys.executable).with_name("canary-obs")), "serve"]  # the image's ENTRYPOINT
        arguments = self.here(self.container("kv-canary")["args"])
        arguments[arguments.index("0.0.0.0")] = "127.0.0.1"  # a test listens on loopback only
        self._run("kv-canary", [*serve, *arguments], self.service_env)
        engine = self.container("engine")
        # `vllm serve MODEL`, whose program does not start here: the CPU build's package has another name.
        assert engine["command"] == ["vllm", "serve"]
        serve = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"]
        arguments = [str(self.model), *self.here(engine["args"][1:]), *CPU_ARGUMENTS]
        binding = "|".join(str(core % (os.cpu_count() or 1)) for core in range(2))
        settings = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": binding,
            # Not from the folder that the tests run in; compiled files show from where.
            "PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": "",
        }  # fmt: skip
        self._run("engine", [*serve, *arguments], settings | dict(self.engine_env))

    def probe(self, name: str, kind: str) -> int:
        """The status that a probe of a container gets."""
        container = self.container(name)
        probe = container[f"{kind}Probe"]["httpGet"]
        (port,) = [each["containerPort"] for each in container["ports"] if each["name"] == probe["port"]]
        return call(f"http://127.0.0.1:{self.ports[port]}{probe['path']}", timeout=30.0)[0]

    def ask_service(self, path: str, body: Any = None) -> Any:
        """The JSON of the service, asked as the person on call."""
        url = f"http://127.0.0.1:{self.ports[9464]}{path}"
        data = None if body is None else json.dumps(body).encode()
        token = (self.path("/etc/kv-canary") / "oncall").read_text()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=120.0) as answer:
            return json.loads(answer.read())

    def path(self, mount: str) -> Path:
        """Where a path of the pod is here; sockets need short ones."""
        return self.folder / mount.strip("/").replace("/", "-")

    def stop(self) -> None:
        """End them; where a test failed, pytest shows what they logged."""
        for process in reversed(self.processes.values()):
            process.stop()
        for name, process in self.processes.items():
            print(f"{name}:\n{process.log.read_text(errors='replace')[-4000:]}")

    def here(self, words: list[str]) -> list[str]:
        """Words of a command of the pod, with the paths and ports that they have here."""
        mounts = {
            mount["mountPath"]
            for name in ("install-canary", "kv-canary", "engine")
            for mount in self.container(name)["volumeMounts"]
        }
        # A program is this checkout's own, which may lie below a mount's path, such as /tmp.
        programs = {"canary-obs": str(Path(sys.executable).with_name("canary-obs"))}
        return [programs.get(word) or self._word(word, mounts) for word in words]

    def _run(self, name: str, command: list[str], settings: Mapping[str, str]) -> None:
        container = self.container(name)
        environment = {each["name"]: each.get("value", f"{name}-0") for each in container["env"]}
        kept = {key: value for key, value in environment.items() if key not in _LEFT_OUT}
        here = dict(zip(kept, self.here(list(kept.values())), strict=True))
        self.processes[name] = Process(command, here | dict(settings), self.folder / f"{name}.log")

    def _word(self, word: str, mounts: set[str]) -> str:
        if word.isdecimal() and int(word) in self.ports:
            return str(self.ports[int(word)])
        scheme, _, path = word.rpartition("://")
        for mount in sorted(mounts, key=len, reverse=True):
            if path == mount or path.startswith(f"{mount}/"):
                return (f"{scheme}://" if scheme else "") + str(self.path(mount)) + path[len(mount) :]
        return word
