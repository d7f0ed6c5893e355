"""Copies of a CPU's tensors on a device, made without waiting for it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from canary_obs.runtime.device.delayed_device_host import Event
from canary_obs.runtime.device.pinned_space import PinnedSpace

_BYTES = 4 << 20  # of a thread and device: several loads of 32768 tokens


class Staging:
    """Copies to a device, out of pinned memory that is allocated once."""

    def __init__(
        self, size: int, device: torch.device, event_factory: Callable[[], Event] | None = None
    ) -> None:
        """`size`: bytes, in all copies that the device has not come to."""
        self._device, self._make_event = device, event_factory or partial(torch.Event, device)
        self._space = PinnedSpace(size, pinned=device.type == "cuda")
        self._under_way: deque[Event] = deque()  # of each piece of it: when the copy is there
        self._spare: list[Event] = []

    def copy(self, tensor: Tensor) -> Tensor | None:
        """A CPU's tensor on the device, in the order of the current stream; None = there is no room now."""
        while self._under_way and self._under_way[0].query():
            self._spare.append(self._under_way.popleft())
            self._space.give_back()
        if (place := self._space.take(tensor)) is None:
            return None
        found = place.copy_(tensor).to(self._device, non_blocking=True, copy=True)
        event = self._spare.pop() if self._spare else self._make_event()
        event.record()
        self._under_way.append(event)
        return found


_threads = threading.local()


def prepare_uploads(device: torch.device) -> Staging:
    """Allocate this thread's memory for copies to the device, unless it has some."""
    made: dict[torch.device, Staging] = _threads.__dict__.setdefault("made", {})
    if device not in made:
        made[device] = Staging(_BYTES, device)
    return made[device]


def uploaded(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy of a CPU's tensor. Out of pinned memory: from other memory, the host may wait for the stream."""
    if device.type == "cuda" and tensor.numel() and not tensor.is_cuda:
        found = prepare_uploads(device).copy(tensor)
        return tensor.pin_memory().to(device, non_blocking=True) if found is None else found
    return tensor.to(device, copy=True)


def uploaded_lists(lists: Sequence[Sequence[int]], device: torch.device) -> list[Tensor]:
    """int64 [n] each, in one copy: parts of one tensor, which lives as long as any of them."""
    sizes = [len(each) for each in lists]
    numbers = np.fromiter(chain.from_iterable(lists), dtype=np.int64, count=sum(sizes))
    return list(torch.split_with_sizes(uploaded(torch.from_numpy(numbers), device), sizes))
