"""The checks of a forward whose batch repeats, launched as one: on a GPU a captured CUDA graph."""

from __future__ import annotations

import gc
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from canary_kernels.buffers import RowBatch

log = logging.getLogger("canary_obs")
Launch = Callable[[], None]
KEPT = 32  # batches, by last use; each may have one graph
REPEATS = 16  # forwards of a batch before it is captured, which takes some 0.2 ms


@dataclass(slots=True)
class _Kept:
    """A batch of each group. As long as they are held, no other objects have their ids."""

    batches: tuple[RowBatch, ...]
    seen: int = 0
    launch: Launch | None = None


class Replays:
    """What a launch reads lies where it lay when it was captured: in tensors that its batches hold."""

    def __init__(self, device: torch.device) -> None:
        """On a CPU nothing is captured: a replay calls what would have been."""
        self._kept: OrderedDict[tuple[int, ...], _Kept] = OrderedDict()
        self._stream = torch.Stream(device) if device.type == "cuda" else None
        self.captured = self.replayed = 0  # since attach
        self._refused = False  # capturing has failed

    def find(self, batches: Sequence[RowBatch]) -> Launch | None:
        """What launches the checks of these very batches; None = they were not captured."""
        kept = self._kept.get(tuple(map(id, batches)))
        return None if kept is None else kept.launch

    def note(self, batches: Sequence[RowBatch], launch: Launch) -> None:
        """A forward of these batches was checked by `launch`, or by what `find` gave."""
        key = tuple(map(id, batches))
        kept = self._kept.get(key)
        if kept is None:
            kept = self._kept[key] = _Kept(tuple(batches))
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        kept.seen += 1
        if kept.seen == REPEATS and not self._refused:
            kept.launch = self._captured(launch)

    def _captured(self, launch: Launch) -> Launch | None:
        if self._stream is None:
            self.captured += 1
            return launch
        try:
            graph = torch.cuda.CUDAGraph()
            with self._stream, _uncollected():
                # What other threads do meanwhile must not end the capture.
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    launch()
                finally:
                    graph.capture_end()
        except Exception as error:  # noqa: BLE001 - each launch by itself does the same
            self._refused = True
            log.warning("canary_obs: checks could not be captured, and are launched one by one: %s", error)
            return None
        self.captured += 1
        replay: Launch = graph.replay
        return replay


class _uncollected:  # noqa: N801 - used as a function
    """No garbage collection: a capture ends with an error when graphs of an engine that is gone are freed."""

    def __enter__(self) -> None:
        self._enabled = gc.isenabled()
        gc.disable()

    def __exit__(self, *raised: object) -> None:
        if self._enabled:
            gc.enable()
