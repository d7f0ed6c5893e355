"""Records that leave and enter an engine with the KV of a disaggregated request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from canary_obs.engines.adapter import Observer
from canary_obs.engines.reference.port import NO_SIDECAR, KVPort
from canary_obs.errors import KVCacheViolation


class PortWatch:
    """Wraps one port: a sidecar is the records of its slots."""

    _SEAMS = ("kind", "outgoing", "reserved", "landed")

    def __init__(self, port: KVPort, observer: Observer, group: str) -> None:
        self._port, self._observer, self._group = port, observer, group

    def wrap(self) -> None:
        """In the instance dictionary: deleting the entries restores the port exactly."""
        for seam in self._SEAMS:
            vars(self._port)[seam] = self._guarded(getattr(self, "_" + seam), getattr(self._port, seam))

    def unwrap(self) -> None:
        """Idempotent."""
        for seam in self._SEAMS:
            vars(self._port).pop(seam, None)

    def _guarded(self, act: Callable[..., Any], otherwise: Callable[..., Any]) -> Callable[..., Any]:
        def observed(*arguments: Any) -> Any:
            try:
                return act(*arguments)
            except KVCacheViolation:
                raise  # mode raise: damaged KV must not be used
            except Exception as error:  # noqa: BLE001 - a fault of the observer's side must not reach the engine
                self._observer.fault("transfer", error)
                return otherwise(*arguments)

        return observed

    def _kind(self) -> int:
        return self._observer.record_format(self._group) or NO_SIDECAR

    def _outgoing(self, slots: Tensor, shares: Sequence[range]) -> Tensor | None:
        return self._observer.records_of(self._group, slots, shares)

    def _reserved(self, slots: Tensor) -> None:
        self._observer.invalidated(self._group, slots)

    def _landed(self, slots: Tensor, sidecars: Sequence[Tensor], kind: int) -> None:
        readable = bool(sidecars) and kind == self._kind()
        self._observer.received(self._group, slots, torch.stack(tuple(sidecars)) if readable else None)
