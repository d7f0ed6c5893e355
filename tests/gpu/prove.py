"""Run every GPU test and measurement: python3 -m tests.gpu.prove --output FOLDER.

Takes half an hour with one GPU, less with two. FOLDER/summary.json has the outcome of each proof
as soon as it has ended. Exit code 1 = a proof failed or could not be run.
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
HOST_TIMES = "pipeline", "step", "kernels", "patrol"  # benches with host times among their figures


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """A command whose exit code 0 proves something."""

    name: str
    command: tuple[str, ...]
    long: bool = False  # shares a GPU with others, and takes as long as all of them together
    needs_host: bool = False  # its timings need the host to themselves
    needs_gpu: bool = False  # its timings need a GPU to themselves
    gpus: int = 1
    environ: dict[str, str] = field(default_factory=dict)
    missing: str = ""  # why it cannot be run here


class Summary:
    """Outcome of each proof: `exit` and `seconds`, or `not_run`; the file is complete at any time."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        self.outcomes: dict[str, dict[str, object]] = {}

    def add(self, name: str, **facts: object) -> None:
        with self._lock:
            self.outcomes[name] = facts
            draft = self._path.with_suffix(".new")
            draft.write_text(json.dumps(self.outcomes, indent=1) + "\n")
            draft.replace(self._path)
            print(name, *(f"{key}={value}" for key, value in facts.items()), flush=True)

    @property
    def ok(self) -> bool:
        return all(facts.get("exit") == 0 for facts in self.outcomes.values())


def proofs(folder: Path, soak_seconds: float) -> list[Proof]:
    """All of them; their results go to the folder."""

    def module(name: str, call: str, *options: str, **facts: object) -> Proof:
        command = (*_PYTHON, *call.split(), *options, "--output", str(folder / f"{name}.json"))
        return Proof(name=name, command=command, **facts)  # type: ignore[arg-type]

    has_vllm = importlib.util.find_spec("vllm") is not None
    no_vllm = "" if has_vllm else "vLLM is not installed"
    no_sanitizer = "" if shutil.which(_SANITIZER) else f"{_SANITIZER} is not installed"
    pytest = *_PYTHON, "pytest", "-p", "no:cacheprovider"
    # One allocation per tensor: otherwise a stray access hits a neighbour and is not noticed.
    no_cache = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return [
        module("soak", "tests.gpu.soak", "--seconds", str(soak_seconds), long=True),
        *(module(name, f"canary_obs bench {name}", needs_host=True) for name in HOST_TIMES),
        *(
            module(f"vllm_{runner}", f"canary_obs bench vllm-gpu --runner {runner}", needs_gpu=True,
                   missing=no_vllm)
            for runner in ("v2", "v1")
        ),
        *(
            module(f"load_{runner}", f"canary_obs bench vllm-load --runner {runner}", needs_gpu=True,
                   missing=no_vllm)
            for runner in ("v2", "v1")
        ),
        *(
            module(f"hit_{runner}", f"canary_obs bench hit --runner {runner}", needs_gpu=True,
                   missing=no_vllm)
            for runner in ("v2", "v1")
        ),
        module("storm", "tests.engines.vllm.storm --device cuda --minutes 10 --processes 5", missing=no_vllm),
        Proof(name="suite", command=(*pytest, "-m", "not slow", "tests/kernels", "tests/gpu")),
        *(
            Proof(
                name=tool,
                command=(_SANITIZER, "--tool", tool, *pytest, "-k", "TRITON", "tests/kernels"),
                environ=no_cache,
                missing=no_sanitizer,
            )
            for tool in ("memcheck", "racecheck")
        ),
        *(
            module(f"drafts_{options.replace(' --draft ', '_')}", f"tests.gpu.vllm_drafts --runner {options}",
                   missing=no_vllm)
            for options in ("v2", "v1", "v1 --draft model")
        ),
        module("two_ranks", "tests.gpu.two_ranks", gpus=2),
    ]  # fmt: skip


def run_all(wanted: Sequence[Proof], gpus: int, folder: Path) -> Summary:
    """Run proofs so that none disturbs the timings of another.

    First those that need the host. Then the long one on the first GPU; at the same time those that need a GPU
    on the last one, and after them the rest, which sees every GPU. With one GPU those that need it come last.
    """
    summary = Summary(folder / "summary.json")
    runnable = []
    for proof in wanted:
        reason = proof.missing or (f"needs {proof.gpus} GPUs, here are {gpus}" if proof.gpus > gpus else "")
        if reason:
            summary.add(proof.name, not_run=reason)
        else:
            runnable.append(proof)
    long = [proof for proof in runnable if proof.long]
    needing_gpu = [proof for proof in runnable if proof.needs_gpu]
    rest = [proof for proof in runnable if not (proof.long or proof.needs_host or proof.needs_gpu)]

    def run_each(devices: str, several: Sequence[Proof]) -> None:
        for proof in several:
            _run(proof, devices, folder, summary)

    run_each("0", [proof for proof in runnable if proof.needs_host])
    with ThreadPoolExecutor(1) as first:
        soaking = first.submit(run_each, "0", long)
        if gpus > 1:
            run_each(str(gpus - 1), needing_gpu)
        run_each(",".join(map(str, range(gpus))), rest)
        soaking.result()
    if gpus == 1:
        run_each("0", needing_gpu)
    return summary


def _run(proof: Proof, devices: str, folder: Path, summary: Summary) -> None:
    started = time.monotonic()
    environ = os.environ | proof.environ | {"CUDA_VISIBLE_DEVICES": devices}
    with (folder / f"{proof.name}.log").open("wb") as log:
        done = subprocess.run(proof.command, stdout=log, stderr=subprocess.STDOUT, env=environ, check=False)
    summary.add(proof.name, exit=done.returncode, seconds=round(time.monotonic() - started, 1))


def main() -> int:
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
