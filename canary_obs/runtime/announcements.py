"""What the engine says it did to slots outside of forwards: records follow, and the history remembers."""

from __future__ import annotations

from torch import Tensor

from canary_kernels import layout
from canary_kernels.fingerprint import compare_slots
from canary_obs.runtime.device.state import DeviceState
from canary_obs.runtime.evidence.history import SlotHistory
from canary_obs.runtime.transfer import joined
from canary_obs.vocabulary import SlotEventKind


class Announcements:
    """Launches only. Raises EngineContractError for a group the engine did not show at attach."""

    def __init__(self, state: DeviceState, history: SlotHistory) -> None:
        self._state, self._history = state, history

    def copied(self, name: str, source: Tensor, destination: Tensor, step: int) -> None:
        """Records go where their bytes went (int64 [n] each)."""
        (group,) = self._state.named((name,))
        group.copy(source, destination)
        self._history.announced(SlotEventKind.COPIED_FROM, group, source, step)
        self._history.announced(SlotEventKind.COPIED_TO, group, destination, step)

    def received(self, name: str, slots: Tensor, records: Tensor | None, step: int) -> None:
        """Slots (int64 [n]) hold bytes from elsewhere; with their records they are compared at once.

        records: int64 [n, RECORD_WORDS], or [shares, n, RECORD_WORDS] where several senders hold shares.
        """
        (group,) = self._state.named((name,))
        if records is None:
            group.adopt(slots)
        else:
            group.store(slots, joined(records.to(slots.device, non_blocking=True)))
            self._state.tick()
            compare_slots(self._state.backend, group.buffers, group.plan, slots, layout.Phase.HEAD)
        self._history.announced(SlotEventKind.RECEIVED, group, slots, step)

    def invalidated(self, name: str, slots: Tensor, step: int) -> None:
        """Slots (int64 [n]) hold nothing that counts."""
        (group,) = self._state.named((name,))
        group.forget(slots)
        self._history.announced(SlotEventKind.INVALIDATED, group, slots, step)
