"""All that a GPU has to prove, in one command: python3 -m tests.gpu.prove --output FOLDER.

Half an hour with one GPU, less with two. FOLDER/summary.json tells how each proof ended, as soon as it has.
Exit code 1 = one did not hold, or was not run.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch

_PYTHON = (sys.executable, "-m")
_SANITIZER = "compute-sanitizer"
QUIET = "pipeline", "step", "kernels", "patrol"  # benches with host times among their figures


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """A command that ends with 0 when what it proves holds."""

    name: str
    command: tuple[str, ...]
    long: bool = False  # shares a GPU with any other, and takes as long as all of them
    quiet: bool = False  # its timings need the host for themselves
    alone: bool = False  # its timings need a GPU for themselves
    gpus: int = 1
    environ: dict[str, str] = field(default_factory=dict)
    missing: str = ""  # why it cannot be run here


class InjectionLog:
    """How each proof ended; on disk at any moment."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        self.ended: dict[str, dict[str, object]] = {}

    def enter(self, name: str, **facts: object) -> None:
        with self._lock:
            self.ended[name] = facts
            draft = self._path.with_suffix(".new")
            draft.write_text(json.dumps(self.ended, indent=1) + "\n")
            draft.replace(self._path)
            print(name, *(f"{key}={value}" for key, value in facts.items()), flush=True)

    @property
    def ok(self) -> bool:
        return all(facts.get("exit") == 0 for facts in self.ended.values())


def proofs(folder: Path, soak_seconds: float) -> list[Proof]:
    """All of them; results go to the folder."""

    def module(name: str, what: str, *given: str, **facts: object) -> Proof:
        command = (*_PYTHON, *what.split(), *given, "--output", str(folder / f"{name}.json"))
        return Proof(name=name, command=command, **facts)  # type: ignore[arg-type]

    has_vllm = importlib.util.find_spec("vllm") is not None
    no_vllm = "" if has_vllm else "vLLM is not installed"
    no_sanitizer = "" if shutil.which(_SANITIZER) else f"{_SANITIZER} is not installed"
    pytest = *_PYTHON, "pytest", "-p", "no:cacheprovider"
    # Each tensor its own allocation: otherwise a stray access hits a neighbour and is none.
    apart = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return [
        module("soak", "tests.gpu.soak", "--seconds", str(soak_seconds), long=True),
        *(module(name, f"canary_obs bench {name}", quiet=True) for name in QUIET),
        *(
            module(f"vllm_{name}", f"canary_obs bench vllm-gpu --runner {name}", alone=True, missing=no_vllm)
            for name in ("v2", "v1")
        ),
        Proof(name="suite", command=(*pytest, "-m", "not slow", "tests/kernels", "tests/gpu")),
        *(
            Proof(
                name=tool,
                command=(_SANITIZER, "--tool", tool, *pytest, "-k", "TRITON", "tests/kernels"),
                environ=apart,
                missing=no_sanitizer,
            )
            for tool in ("memcheck", "racecheck")
        ),
        *(
            module(f"drafts_{given.replace(' --draft ', '_')}", f"tests.gpu.vllm_drafts --runner {given}",
                   missing=no_vllm)
            for given in ("v2", "v1", "v1 --draft model")
        ),
        module("two_ranks", "tests.gpu.two_ranks", gpus=2),
    ]  # fmt: skip


def run_all(wanted: Sequence[Proof], gpus: int, folder: Path) -> InjectionLog:
    """The quiet ones; the long one on the first GPU, beside it those alone on the last, then the rest.

    The rest sees every GPU. On the only GPU those alone wait for all the others.
    """
    injections = InjectionLog(folder / "summary.json")
    runnable = []
    for proof in wanted:
        reason = proof.missing or (f"needs {proof.gpus} GPUs, here are {gpus}" if proof.gpus > gpus else "")
        if reason:
            injections.enter(proof.name, not_run=reason)
        else:
            runnable.append(proof)
    long = [proof for proof in runnable if proof.long]
    alone = [proof for proof in runnable if proof.alone]
    rest = [proof for proof in runnable if not (proof.long or proof.quiet or proof.alone)]

    def in_turn(devices: str, several: Sequence[Proof]) -> None:
        for proof in several:
            _run(proof, devices, folder, injections)

    in_turn("0", [proof for proof in runnable if proof.quiet])
    with ThreadPoolExecutor(1) as first:
        soaking = first.submit(in_turn, "0", long)
        if gpus > 1:
            in_turn(str(gpus - 1), alone)
        in_turn(",".join(map(str, range(gpus))), rest)
        soaking.result()
    if gpus == 1:
        in_turn("0", alone)
    return injections


def _run(proof: Proof, devices: str, folder: Path, injections: InjectionLog) -> None:
    started = time.monotonic()
    environ = os.environ | proof.environ | {"CUDA_VISIBLE_DEVICES": devices}
    with (folder / f"{proof.name}.log").open("wb") as log:
        done = subprocess.run(proof.command, stdout=log, stderr=subprocess.STDOUT, env=environ, check=False)
    injections.enter(proof.name, exit=done.returncode, seconds=round(time.monotonic() - started, 1))


def main() -> int:
    """Run what is wanted; see the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--soak-seconds", type=float, default=1200.0)
    parser.add_argument("--skip", nargs="*", default=[], metavar="NAME", help="proofs to leave out")
    given = parser.parse_args()
    gpus = torch.cuda.device_count()
    if not gpus:
        parser.error("torch sees no GPU; run this where there is one")
    given.output.mkdir(parents=True, exist_ok=True)
    every = proofs(given.output, given.soak_seconds)
    if unknown := set(given.skip) - {proof.name for proof in every}:
        parser.error(f"--skip {sorted(unknown)}: known are {', '.join(proof.name for proof in every)}")
    wanted = [proof for proof in every if proof.name not in given.skip]
    return int(not run_all(wanted, gpus, given.output).ok)


if __name__ == "__main__":
    sys.exit(main())
