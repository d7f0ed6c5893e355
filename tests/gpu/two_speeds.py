"""The two speeds of a captured forward: `python -m tests.gpu.two_speeds [--output FILE]`; needs a GPU.

A graph of some 300 kernels, as of a model of 8 billion parameters that decodes one request, is replayed one
step ahead: alone, and after each of the things that an observer might do. Printed, as JSON: ms per replay.
Before each case but the first, another process uses the GPU, which gives the faster speed. All of it also
with kernels that may begin before the previous one ends ("early"), as some of an engine may.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from canary_obs.bench.environment import environment
from canary_obs.bench.launch_speed import launch_as_alone

_LAYERS, _REPLAYS, _TIMES = 32, 40, 3
_WEIGHTS = (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)
_OTHER = "other"  # argument of the process that uses the GPU when it is asked to


@triton.jit  # type: ignore[untyped-decorator]
def _add_one(numbers, size: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, size)
    tl.store(numbers + at, tl.load(numbers + at) + 1)


class Forward:
    """The graph, and the streams next to it."""

    def __init__(self, *, early: bool) -> None:
        """`early`: its small kernels may begin before the ones before them end."""
        self.device, self._early = torch.device("cuda"), early
        draw = {"device": self.device, "dtype": torch.bfloat16}
        self._weights = [[torch.randn(shape, **draw) * 0.02 for shape in _WEIGHTS] for _ in range(_LAYERS)]
        self._tokens = torch.randn(8, 4096, **draw)
        self.numbers, self._few = torch.zeros(1024, device=self.device), torch.zeros(1024, device=self.device)
        self.pinned = torch.zeros(1024, pin_memory=True)
        with torch.Stream(self.device):
            for _ in range(3):
                self._compute()
        self._graph = self._captured(self._compute)
        self._few_graph = self._captured(lambda: self.launch(3))
        self.side = torch.Stream(self.device)
        self._launched, self._done = torch.Event(self.device), torch.Event(self.device)
        self._done.record()

    def _captured(self, launch: Callable[[], object]) -> torch.cuda.CUDAGraph:
        launch()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch()
        return graph

    def _compute(self) -> None:
        rows = self._tokens
        for qkv, out, up, down in self._weights:
            for weights, width in ((qkv, 4096), (out, 4096), (up, 14336), (down, 4096)):
                rows = torch.mm(rows, weights.t())[:, :width].contiguous()
                _add_one[(1,)](self.numbers, 1024, launch_pdl=self._early)

    def launch(self, kernels: int) -> None:
        """Small kernels, on the current stream."""
        for _ in range(kernels):
            _add_one[(1,)](self._few, 1024)

    def alone(self) -> None:
        """The forward."""
        self._graph.replay()

    def beside(self, launch: Callable[[], object]) -> Callable[[], None]:
        """The forward, with that on the side stream after it, for which the next one waits."""

        def step() -> None:
            self._done.wait()
            self._graph.replay()
            self._launched.record()
            self.side.wait_event(self._launched)
            with self.side:
                launch()
                self._done.record()

        return step

    def replay_few(self) -> None:
        """The small kernels as a graph."""
        self._few_graph.replay()

    def launch_urgently(self) -> None:
        """A small kernel on a stream of high priority."""
        with torch.Stream(self.device, priority=-1):
            self.launch(1)
        torch.cuda.synchronize()

    def copy(self) -> None:
        """A copy to the host, on the current stream."""
        self.pinned.copy_(self._few, non_blocking=True)

    def times(self, step: Callable[[], object]) -> list[float]:
        """Milliseconds per step, with one step ahead of the device."""
        found = []
        for _ in range(_TIMES):
            ended = [torch.cuda.Event() for _ in range(2)]
            torch.cuda.synchronize()
            started = time.perf_counter()
            for number in range(_REPLAYS):
                step()
                ended[number % 2].record()
                if number:
                    ended[(number - 1) % 2].synchronize()
            torch.cuda.synchronize()
            found.append(round(1e3 * (time.perf_counter() - started) / _REPLAYS, 4))
        return found


def cases(forward: Forward) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """By name: what is done once, and the step that is timed then."""

    def nothing() -> None:
        pass

    def once(launch: Callable[[], object]) -> Callable[[], None]:
        def act() -> None:
            with forward.side:
                launch()

        return act

    some = lambda: forward.launch(3)  # noqa: E731
    return {
        "used": (nothing, forward.alone),
        "kernels on another stream": (once(some), forward.alone),
        "a copy on another stream": (once(forward.copy), forward.alone),
        "a kernel of high priority": (forward.launch_urgently, forward.alone),
        "kernels on 40 streams": (launch_as_alone, forward.alone),
        "each step a wait beside it": (nothing, forward.beside(nothing)),
        "each step kernels beside it": (nothing, forward.beside(some)),
        "the forward after these": (forward.beside(some), forward.alone),
        "each step a graph beside it": (nothing, forward.beside(forward.replay_few)),
        "the forward after this graph": (forward.beside(forward.replay_few), forward.alone),
        "each step a copy beside it": (nothing, forward.beside(forward.copy)),
    }


def run(*, early: bool) -> dict[str, Any]:
    """Milliseconds per step, by case."""
    forward = Forward(early=early)
    found = {"before": forward.times(forward.alone)}
    command = [sys.executable, "-m", "tests.gpu.two_speeds", _OTHER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        for name, (act, step) in cases(forward).items():
            torch.cuda.synchronize()
            print(name, file=other.stdin, flush=True)
            other.stdout.readline()
            act()
            found[name] = forward.times(step)
        other.stdin.close()
    found["the other process has ended"] = forward.times(forward.alone)
    return found


def use_the_gpu() -> None:
    """Launch a kernel for each line."""
    number = torch.zeros(1, device="cuda")
    for _ in sys.stdin:
        number += 1
        torch.cuda.synchronize()
        print("used", flush=True)


def main() -> None:
    """Print the times, and write them to a file."""
    if sys.argv[1:] == [_OTHER]:
        use_the_gpu()
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    found = {"plain": run(early=False), "early": run(early=True)}
    result = {"environment": environment(), "ms": found}
    sys.stdout.write(json.dumps(result, indent=1) + "\n")
    if given.output is not None:
        given.output.write_text(json.dumps(result, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
