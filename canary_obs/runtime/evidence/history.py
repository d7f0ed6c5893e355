"""Remembers the last write of each slot, and the engine's recent announcements."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from canary_kernels import layout
from canary_obs.engine_api.views import StepView
from canary_obs.runtime.device.state import DeviceState, Group
from canary_obs.slot_facts import SlotEvent, request_name
from canary_obs.vocabulary import SlotEventKind

ANNOUNCEMENTS = 16
_MAX_SLOTS = 8192  # kept of one announcement


@dataclass(frozen=True, slots=True, kw_only=True)
class _Announcement:
    kind: SlotEventKind
    group: int
    step: int
    slots: Tensor  # int64 [n] on the device; a copy


class SlotHistory:
    """Launches only. Following writes costs one launch per group and forward, and 8 B per slot."""

    WORDS: ClassVar[int] = 1 + ANNOUNCEMENTS  # int64 words that `read` fills

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
        """Whether writes are followed, in addition to announcements."""
        return self._written is not None

    @property
    def held_bytes(self) -> int:
        """Device bytes that hold the last writes."""
        return sum(written.nbytes for written in self._written or ())

    def record_writes(self, view: StepView) -> None:
        """Note the clock for the output slots of a forward."""
        if self._written is None:
            return
        for name, shown in view.groups.items():
            index, slots = self._state.by_name[name].index, shown.out_slots
            if slots.is_cuda:
                # Out of range, an index would end the process's use of the device.
                inside = slots.clamp(-1, self._written[index].shape[0] - 1)
                self._written[index].index_put_((inside,), self._state.clock)
            else:
                # A tenth of what index_put_ takes on the CPU.
                self._on_host[index][slots.numpy()] = self._state.now

    def written_step(self, name: str, slot: int) -> int | None:
        """The forward of a slot's last write; None = not known on the host, or there was none."""
        if self._written is None or self._state.clock.is_cuda:
            return None
        written = int(self._on_host[self._state.by_name[name].index][slot])
        return written >> layout.TICK_BITS if written >= 0 else None

    def record_announcement(
        self, kind: SlotEventKind, group: Group, slots: Tensor, step: int, *, stays: bool = False
    ) -> None:
        """Note that the engine copied, received or invalidated slots (int64 [n]).

        stays: nobody will change what is in `slots`.
        """
        kept = slots[:_MAX_SLOTS]
        if not stays or len(kept) < len(slots):  # a part of a tensor keeps all of its memory
            kept = kept.clone()
        self._recent.append(_Announcement(kind=kind, group=group.index, step=step, slots=kept))

    def read(self, group: Group, slot: int, into: Tensor) -> tuple[tuple[SlotEventKind, int], ...]:
        """Fill `into` (int64 [WORDS]): clock of the slot's last write, then 1 per announcement that names it.

        Returns those announcements, kind and step, in the order of the words. -1 = unknown.
        """
        into.fill_(-1)
        if self._written is not None:
            into[0].copy_(self._written[group.index][slot])
        recent = [announcement for announcement in self._recent if announcement.group == group.index]
        for word, announcement in zip(into[1:], recent, strict=False):
            word.copy_((announcement.slots == slot).any())
        return tuple((announcement.kind, announcement.step) for announcement in recent)

    def events(
        self, announcements: Sequence[tuple[SlotEventKind, int]], words: Sequence[int]
    ) -> tuple[SlotEvent, ...]:
        """Decode a host copy of the words that `read` filled; oldest first."""
        found = [
            SlotEvent(kind=kind, step=step)
            for (kind, step), named in zip(announcements, words[1:], strict=False)
            if named == 1
        ]
        if words[0] >= 0:
            step = words[0] >> layout.TICK_BITS
            requests = tuple(map(request_name, self._requests_at(step)))
            found.append(SlotEvent(kind=SlotEventKind.WRITTEN, step=step, requests=requests))
        return tuple(sorted(found, key=lambda event: event.step))
