"""Compares the bytes of slots that a forward reads for the first time: prefix hits, and copies of slots."""

from __future__ import annotations

from torch import Tensor

from canary_kernels import layout
from canary_kernels.fingerprint import compare_slots
from canary_obs.config import CanaryConfig
from canary_obs.runtime.device.state import DeviceState, Group
from canary_obs.runtime.device.upload_ring import UploadRing
from canary_obs.runtime.device.uploads import uploaded
from canary_obs.runtime.forward_account import ForwardAccount
from canary_obs.runtime.health import Health

# Slots of one launch and one upload, and uploads that may be under way: 2 MiB of pinned memory.
_CHUNK = 32768
_UPLOADS = 8


class FirstReads:
    """Launches only. On a GPU the list of slots is copied from pinned memory that is allocated here."""

    def __init__(
        self, state: DeviceState, health: Health, account: ForwardAccount, config: CanaryConfig
    ) -> None:
        self._state, self._health, self._account = state, health, account
        device = state.clock.device
        self._device = device
        rows = _UPLOADS if config.verify_on_hit and device.type != "cpu" else 0
        self._uploads = UploadRing(_CHUNK, rows, device)
        # A copy may be announced before it was made: it is compared when the next forward begins.
        self._copied: list[tuple[Group, Tensor]] = []
        self._owed = [0] * len(state.groups)  # announced slots of copies, by group
        self.waiting = 0  # all of these: 0 = `take_copied` has nothing to return

    def hit(self, group: Group, slots: Tensor, step: int) -> None:
        """Compare slots (int64 [n]; -1 = skip) that a forward is the first to read.

        Number `step` if that is under way, or else the next one.
        """
        state = self._state
        step += not self._account.under_way
        self._account.before_comparison(group.name)
        state.owed.compared(group.index, layout.Phase.HIT, slots.shape[0])
        for start in range(0, slots.shape[0], _CHUNK):
            state.tick(step)
            uploaded = self._on_device(slots[start : start + _CHUNK])
            compare_slots(state.backend, group.buffers, group.plan, uploaded, layout.Phase.HIT)
            self._health.count_launch(group.index, layout.Phase.HIT)

    def copied(self, group: Group, destination: Tensor) -> None:
        """Have slots (int64 [n], -1 = skip) compared when the next forward begins: by then they are there."""
        if not destination.shape[0]:
            return
        self._owed[group.index] += destination.shape[0]
        self.waiting += destination.shape[0]
        self._copied.append((group, destination.to(self._device, non_blocking=True).contiguous()))

    def take_copied(self) -> list[tuple[Group, Tensor]]:
        """What was copied since the last call: groups and slots that the caller has to compare now."""
        if not any(self._owed):
            return self._copied
        for index, slots in enumerate(self._owed):
            self._state.owed.compared(index, layout.Phase.HIT, slots)
            self._owed[index] = 0
        self.waiting = 0
        copied, self._copied = self._copied, []
        return copied

    def _on_device(self, slots: Tensor) -> Tensor:
        if slots.device.type == self._device.type:
            return slots.contiguous()
        if self._uploads.ready:
            (on_device,) = self._uploads.put(slots)
            return on_device
        return uploaded(slots, self._device)  # more hits at once than the ring holds
