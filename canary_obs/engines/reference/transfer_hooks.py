"""Records that leave and enter an engine with the KV of a disaggregated request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from canary_obs.engine_api.observer import Observer
from canary_obs.errors import KVCacheViolation
from canary_obs.reference_engine.cache.connector import NO_METADATA, KVConnector

_KINDS, _KIND_FACTOR = 1 << 56, 31  # the formats of all groups in one number


class TransferHooks:
    """Wraps one port: a sidecar is the records of its slots, group after group."""

    _SEAMS = ("kind", "outgoing", "reserved", "landed")

    def __init__(self, port: KVConnector, observer: Observer, groups: Sequence[str]) -> None:
        self._port, self._observer, self._groups = port, observer, tuple(groups)

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
        kind = NO_METADATA
        for group in self._groups:
            kind = (_KIND_FACTOR * kind + (self._observer.record_format(group) or NO_METADATA)) % _KINDS
        return kind

    def _outgoing(self, slots: Tensor, shares: Sequence[range]) -> Tensor | None:
        found = [self._observer.records_of(group, slots, shares) for group in self._groups]
        records = [one for one in found if one is not None]
        return torch.cat(records, dim=-1) if len(records) == len(found) else None

    def _reserved(self, slots: Tensor) -> None:
        for group in self._groups:
            self._observer.invalidated(group, slots)

    def _landed(self, slots: Tensor, transfer_metadata: Sequence[Tensor], kind: int) -> None:
        readable = bool(transfer_metadata) and kind == self._kind()
        records = torch.stack(tuple(transfer_metadata)).chunk(len(self._groups), dim=-1) if readable else ()
        for number, group in enumerate(self._groups):
            self._observer.received(group, slots, records[number].contiguous() if readable else None)
