"""Streams, events and pinned memory as SGLang expects them, on a CPU, where everything is in order."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

_CREATING = ("empty", "zeros", "ones", "empty_like", "zeros_like", "tensor", "full", "arange")


class Event:
    """An event of a device without queues: it has always happened."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Takes what those of devices take."""

    def record(self, *_: Any, **__: Any) -> None:
        """Nothing is under way."""

    def synchronize(self) -> None:
        """Nothing is under way."""

    def wait(self, *_: Any) -> None:
        """Nothing is under way."""

    def query(self) -> bool:
        """It has happened."""
        return True

    def elapsed_time(self, _: Event) -> float:
        """Milliseconds; not measured."""
        return 0.0


class Stream:
    """A stream of a device without queues."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Takes what those of devices take."""
        self.cuda_stream = id(self)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def wait_stream(self, _: Any) -> None:
        """Nothing is under way."""

    def wait_event(self, _: Any) -> None:
        """Nothing is under way."""

    def synchronize(self) -> None:
        """Nothing is under way."""

    def query(self) -> bool:
        """Nothing is under way."""
        return True

    def record_event(self, event: Event | None = None) -> Event:
        """An event that has happened."""
        return event or Event()


def install() -> None:
    """For the rest of this process; before SGLang is imported. Idempotent."""
    module: Any = torch.cpu
    if module.Stream is Stream:
        return
    current = Stream()
    module.Stream, module.Event = Stream, Event
    module.stream = module.StreamContext = lambda _=None: contextlib.nullcontext()
    module.current_stream = lambda _=None: current
    for name in _CREATING:
        setattr(torch, name, _unpinned(getattr(torch, name)))
    tensor: Any = torch.Tensor
    tensor.pin_memory = lambda self, *_, **__: self
    tensor.record_stream = lambda self, _: None


def _unpinned(create: Callable[..., Any]) -> Callable[..., Any]:
    """The function without `pin_memory`, which asks for a driver."""

    def created(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        return create(*args, **kwargs)

    return created
