"""What the engine says it did to slots outside of forwards: records follow, and the history remembers."""

from __future__ import annotations

from torch import Tensor

from canary_obs.runtime.history import SlotHistory
from canary_obs.runtime.state import DeviceState
from canary_obs.terms import SlotEventKind


class Announcements:
    """Launches only. Raises KeyError for a group the engine did not show at attach."""

    def __init__(self, state: DeviceState, history: SlotHistory) -> None:
        self._groups, self._history = state.by_name, history

    def copied(self, name: str, source: Tensor, destination: Tensor, step: int) -> None:
        """Records go where their bytes went (int64 [n] each)."""
        group = self._groups[name]
        group.copy(source, destination)
        self._history.announced(SlotEventKind.COPIED_FROM, group, source, step)
        self._history.announced(SlotEventKind.COPIED_TO, group, destination, step)

    def received(self, name: str, slots: Tensor, step: int) -> None:
        """Slots (int64 [n]) hold bytes without records."""
        group = self._groups[name]
        group.adopt(slots)
        self._history.announced(SlotEventKind.RECEIVED, group, slots, step)

    def invalidated(self, name: str, slots: Tensor, step: int) -> None:
        """Slots (int64 [n]) hold nothing that counts."""
        group = self._groups[name]
        group.forget(slots)
        self._history.announced(SlotEventKind.INVALIDATED, group, slots, step)
