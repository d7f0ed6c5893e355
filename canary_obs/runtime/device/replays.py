"""Launches of a forward whose batch repeats, launched as one: on a GPU a captured CUDA graph."""

from __future__ import annotations

import gc
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

log = logging.getLogger("canary_obs")
Launch = Callable[[], None]
KEPT = 64  # heads and tails, by last use; each may have one graph
# Forwards of a batch before it is captured. That takes some 0.2 ms, what six or seven replays save.
REPEATS = 8
FORWARDS_WAITED = 16  # for a forward that is long anyway; then it is captured all the same


@dataclass(slots=True, eq=False)
class Kept:
    """As long as the parts are held, no other objects have their ids."""

    parts: tuple[object, ...]
    seen: int = 0
    launch: Launch | None = None  # all of it as one, once it was captured


@dataclass(slots=True, eq=False)
class Repeated:
    """The last forward's launches. While the same view is shown, nothing has to be looked up for them."""

    view: object = None
    parts: object = None  # of the view, that they read
    may: bool = False  # repeat
    launch: Launch | None = None  # what `use` has returned

    def renew(self, view: object, parts: object, *, may: bool) -> None:
        """Of another forward."""
        self.view, self.parts, self.may, self.launch = view, parts, may, None


class Replays:
    """What a launch reads lies where it lay when it was captured: in tensors that its parts hold."""

    def __init__(self, device: torch.device) -> None:
        """On a CPU nothing is captured: a replay calls what would have been."""
        self._kept: OrderedDict[tuple[int, ...], Kept] = OrderedDict()
        self._stream = torch.Stream(device) if device.type == "cuda" else None
        self.captured = self.failed = self.replayed = 0  # since attach
        self.due: deque[tuple[Kept, Launch]] = deque()  # to be captured
        self.before, self.after = Repeated(), Repeated()  # launches before, and after the last forward
        self.clocked = Repeated()  # those after it where they set the clock, too
        self._waited = 0  # forwards, for that
        self._refused = False  # capturing has failed

    def use(self, parts: Sequence[object], launch: Launch) -> Launch | None:
        """What does `launch` of these very objects at once; None = it was not captured, so call that."""
        key = tuple(map(id, parts))
        kept = self._kept.get(key)
        if kept is None:
            kept = self._kept[key] = Kept(tuple(parts))
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        kept.seen += 1
        if kept.seen == REPEATS and not self._refused:
            self.due.append((kept, launch))
        return kept.launch

    def end_forward(self, *, long: bool) -> None:
        """A forward ends. `long`: it takes so much time that capturing a head and a tail makes no difference.

        Call on the engine's thread: while another one samples, a capture makes its random numbers fail.
        """
        if self.due:
            self._waited += 1
            if long:
                self.capture()
            if long or self._waited > FORWARDS_WAITED:
                self.capture()

    def capture(self) -> None:
        """Capture what has waited longest."""
        if not self.due:
            return
        self._waited = 0
        kept, launch = self.due.popleft()
        if not self._refused and self._kept.get(tuple(map(id, kept.parts))) is kept:
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
            self.failed += 1
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
