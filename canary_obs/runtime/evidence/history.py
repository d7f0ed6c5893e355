"""What each slot went through by the engine's own announcements: the last write, recent moves."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from canary_kernels import layout
from canary_obs.engine_api.views import StepView
from canary_obs.runtime.device.state import DeviceState, Group
from canary_obs.slot_facts import SlotEvent
from canary_obs.vocabulary import SlotEventKind

ANNOUNCEMENTS = 16
_SLOTS_KEPT = 8192  # of one announcement


@dataclass(frozen=True, slots=True, kw_only=True)
class _Announcement:
    kind: SlotEventKind
    group: int
    step: int
    slots: Tensor  # on the device, our own copy


class SlotHistory:
    """Launches only. Where writes are followed, each forward costs one launch per group and 8 B per slot."""

    WORDS = 1 + ANNOUNCEMENTS  # int64 words that `look_up` fills

    def __init__(
        self, state: DeviceState, follow_writes: bool, requests_at: Callable[[int], Sequence[str]]
    ) -> None:
        self._state, self._requests_at = state, requests_at
        self._recent: deque[_Announcement] = deque(maxlen=ANNOUNCEMENTS)
        # One element more than slots: a skipped token's -1 lands there.
        self._written: tuple[Tensor, ...] | None = None
        if follow_writes:
            self._written = tuple(
                torch.full((group.view.num_slots + 1,), -1, dtype=torch.int64, device=state.clock.device)
                for group in state.groups
            )
            if not state.clock.is_cuda:
                self._on_host = tuple(written.numpy() for written in self._written)

    @property
    def writes_known(self) -> bool:
        """Whether writes are followed, not only announcements."""
        return self._written is not None

    @property
    def held_bytes(self) -> int:
        """Device bytes held per slot for the last write."""
        return sum(written.nbytes for written in self._written or ())

    def wrote(self, view: StepView) -> None:
        """A forward is about to write its output slots."""
        if self._written is None:
            return
        for name, shown in view.groups.items():
            index, slots = self._state.by_name[name].index, shown.out_slots
            if slots.is_cuda:
                self._written[index].index_put_((slots,), self._state.clock)
            else:
                # A tenth of what index_put_ takes on the CPU.
                self._on_host[index][slots.numpy()] = self._state.now

    def announced(self, kind: SlotEventKind, group: Group, slots: Tensor, step: int) -> None:
        """The engine copied, received or invalidated slots (int64 [n])."""
        kept = slots[:_SLOTS_KEPT].clone()
        self._recent.append(_Announcement(kind=kind, group=group.index, step=step, slots=kept))

    def look_up(self, group: Group, slot: int, into: Tensor) -> tuple[tuple[SlotEventKind, int], ...]:
        """Fill `into` (int64 [WORDS]) with the slot's last write and who of the announcements names it."""
        into.fill_(-1)
        if self._written is not None:
            into[0].copy_(self._written[group.index][slot])
        mine = [one for one in self._recent if one.group == group.index]
        for word, announcement in zip(into[1:], mine, strict=False):
            word.copy_((announcement.slots == slot).any())
        return tuple((one.kind, one.step) for one in mine)

    def events(
        self, announcements: Sequence[tuple[SlotEventKind, int]], words: Sequence[int]
    ) -> tuple[SlotEvent, ...]:
        """The events that a host copy of `look_up`'s words tells of, oldest first."""
        found = [
            SlotEvent(kind=kind, step=step)
            for (kind, step), named in zip(announcements, words[1:], strict=False)
            if named == 1
        ]
        if words[0] >= 0:
            step = words[0] >> layout.TICK_BITS
            requests = tuple(self._requests_at(step))
            found.append(SlotEvent(kind=SlotEventKind.WRITTEN, step=step, requests=requests))
        return tuple(sorted(found, key=lambda event: event.step))
