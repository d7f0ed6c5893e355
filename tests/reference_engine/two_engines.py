"""Real processes, joined by a real gloo: each rank runs what it is asked to, one scenario after another."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.forked import CONTEXT

_ANSWER_SECONDS = 240.0  # a hang is told, a loaded machine is not

Scenario = Callable[..., Any]


class Ranks:
    """The processes of one cluster."""

    def __init__(self, prefill: int, decode: int, rendezvous: Path, patience: float, engines: int) -> None:
        self.prefill, self.decode, self._patience = prefill, decode, patience
        self._ends: list[Connection] = []
        self._processes = []
        for rank in range(prefill + decode):
            mine, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(
                target=_serve,
                args=(theirs, rank, prefill, decode, f"file://{rendezvous}", engines),
                daemon=True,
            )
            process.start()
            self._ends.append(mine)
            self._processes.append(process)

    def run(self, scenario: Scenario, **arguments: Any) -> list[Any]:
        """The answers of all ranks, prefill first; an error on any rank is raised here with its traceback."""
        for end in self._ends:
            end.send((scenario, arguments))
        answers = []
        for rank, end in enumerate(self._ends):
            if not end.poll(self._patience):
                raise TimeoutError(f"rank {rank} did not answer {scenario.__name__} {arguments}")
            failed, answer = end.recv()
            if failed:
                raise AssertionError(f"rank {rank}: {answer}")
            answers.append(answer)
        return answers

    def stop(self) -> None:
        """End the processes."""
        for end in self._ends:
            end.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()


@contextmanager
def ranks(
    prefill: int, decode: int, folder: Path, patience: float = _ANSWER_SECONDS, prefill_engines: int = 1
) -> Iterator[Ranks]:
    """A cluster for the duration of a block; `patience`: seconds until an answer counts as a hang."""
    rendezvous = folder / f"rendezvous-{prefill}-{decode}"
    started = Ranks(prefill, decode, rendezvous, patience, prefill_engines)
    try:
        yield started
    finally:
        started.stop()


def _serve(pipe: Connection, *place: Any) -> None:
    import torch

    from canary_obs.reference_engine.disaggregated.cluster import Cluster

    torch.set_num_threads(1)
    cluster = Cluster(*place)
    while True:
        try:
            scenario, arguments = pipe.recv()
        except EOFError:
            break
        try:
            pipe.send((False, scenario(cluster, **arguments)))
        except Exception:  # noqa: BLE001 - told to the test
            pipe.send((True, traceback.format_exc()))
    cluster.close()
