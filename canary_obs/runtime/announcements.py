"""Applies what the engine announces about slots outside of forwards to records and history."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from canary_kernels import layout
from canary_kernels.fingerprint import compare_slots
from canary_obs.runtime.device.state import DeviceState, Group
from canary_obs.runtime.evidence.history import SlotHistory
from canary_obs.runtime.first_reads import FirstReads
from canary_obs.runtime.loads import Loads
from canary_obs.runtime.transfer import join_records
from canary_obs.vocabulary import SlotEventKind


class LastChecks(Protocol):
    """What is still to be launched before slots change."""

    def launch_head(self) -> None:
        """Leave nothing of the forward before."""

    def before_load(self, group: Group, slots: Tensor, step: int) -> None:
        """Compare the bytes of slots (int64 [n]; -1 = skip) that a load writes over after forward `step`."""


class Announcements:
    """Launches only. Raises EngineContractError for a group that the adapter did not show at attach."""

    def __init__(
        self, state: DeviceState, history: SlotHistory, first_reads: FirstReads, checks: LastChecks
    ) -> None:
        self.state, self._history, self._first_reads, self._checks = state, history, first_reads, checks
        self.before = checks.launch_head  # call it before anything is announced
        self.loads = Loads(state, history)

    def hit(self, name: str, slots: Tensor, step: int) -> None:
        """Compare bytes of slots (int64 [n]; -1 = skip) that joined a request of this or the next step."""
        (group,) = self.state.named((name,))
        self._first_reads.hit(group, slots, step)

    def copied(self, name: str, source: Tensor, destination: Tensor, step: int) -> None:
        """Copy the records of slots (int64 [n] each); compare the copies before the next forward."""
        (group,) = self.state.named((name,))
        group.copy(source, destination)
        self._first_reads.copied(group, destination)
        self._history.record_announcement(SlotEventKind.COPIED_FROM, group, source, step)
        self._history.record_announcement(SlotEventKind.COPIED_TO, group, destination, step)

    def before_load(self, name: str, slots: Tensor, step: int) -> None:
        """Compare the bytes of slots (int64 [n]; -1 = skip) that a load is about to write over."""
        (group,) = self.state.named((name,))
        self._checks.before_load(group, slots, step)

    def awaited(self, name: str, slots: Tensor, step: int) -> None:
        """Note that bytes are on their way into slots (int64 [n]): nothing there is compared until then."""
        (group,) = self.state.named((name,))
        group.await_bytes(slots)
        self._history.record_announcement(SlotEventKind.AWAITED, group, slots, step)

    def received(
        self, name: str, slots: Tensor, records: Tensor | None, peer: str, request: str, step: int
    ) -> None:
        """Compare received bytes of slots (int64 [n], each once) with their records.

        Slots without records, or whose sender knew no fingerprint of them, get a baseline now.

        records: int64 [n, RECORD_WORDS], or [shares, n, RECORD_WORDS] from several senders.
        peer: who sent them; request: whose they are; "" = unknown.
        """
        (group,) = self.state.named((name,))
        if records is None:
            group.receive(slots)
        else:
            group.store(slots, join_records(records.to(slots.device, non_blocking=True)))
            self.state.tick()
            self.state.arrivals.compared(self.state.now, peer, request)
            self.state.owed.compared(group.index, layout.Phase.HEAD, slots.shape[0])
            compare_slots(self.state.backend, group.buffers, group.plan, slots, layout.Phase.HEAD)
            group.take_baseline(slots)
        self._history.record_announcement(SlotEventKind.RECEIVED, group, slots, step)

    def invalidated(self, name: str, slots: Tensor, step: int) -> None:
        """Empty the records of slots (int64 [n])."""
        (group,) = self.state.named((name,))
        group.forget(slots)
        self._history.record_announcement(SlotEventKind.INVALIDATED, group, slots, step)
