"""Records that are sent and received with the KV of a disaggregated request."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from canary_obs.engine_api.observer import Observer
from canary_obs.engines.toolkit.guarded import guarded
from canary_obs.engines.toolkit.method_patches import MethodPatches
from canary_obs.reference_engine.cache.connector import NO_METADATA, KVConnector

_FORMATS, _FORMAT_FACTOR = 1 << 56, 31  # record formats of all groups are hashed to one number


class TransferHooks:
    """Replaces the methods of one connector; transfer metadata is the slots' records, group after group."""

    def __init__(
        self,
        connector: KVConnector,
        observer: Observer,
        groups: Mapping[str, Sequence[str]],
        join: Callable[[], None],
    ) -> None:
        """`groups`: names of those whose KV travels, by the numbering of their slots.

        `join`: later launches wait for checks that are still under way.
        """
        self._connector, self._observer, self._groups, self._join = connector, observer, groups, join

    def wrap(self, patches: MethodPatches) -> None:
        """Replace the methods on the instance."""
        patches.wrap(self._connector, "kind", partial(self._instead, self._kind))
        patches.wrap(self._connector, "outgoing", partial(self._instead, self._outgoing))
        patches.wrap(self._connector, "reserved", partial(self._instead, self._reserved))
        patches.wrap(self._connector, "landed", partial(self._instead, self._landed))

    def _instead(self, replacement: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
        def observed(*args: Any) -> Any:
            returned = guarded(self._observer, "transfer", lambda: (replacement(*args),))
            return original(*args) if returned is None else returned[0]

        return observed

    def _kind(self) -> int:
        combined = NO_METADATA
        for group in chain.from_iterable(self._groups.values()):
            own = self._observer.record_format(group) or NO_METADATA
            combined = (_FORMAT_FACTOR * combined + own) % _FORMATS
        return combined

    def _outgoing(self, numbering: str, slots: Tensor, shares: Sequence[range]) -> Tensor | None:
        found = [self._observer.records_of(group, slots, shares) for group in self._groups[numbering]]
        records = [one for one in found if one is not None]
        return torch.cat(records, dim=-1) if len(records) == len(found) else None

    def _reserved(self, numbering: str, slots: Tensor) -> None:
        self._join()
        for group in self._groups[numbering]:
            self._observer.before_load(group, slots)
            self._observer.invalidated(group, slots)

    def _landed(
        self, numbering: str, slots: Tensor, transfer_metadata: Sequence[Tensor], kind: int, peer: str = ""
    ) -> None:
        groups = self._groups[numbering]
        readable = bool(transfer_metadata) and kind == self._kind()
        records = torch.stack(tuple(transfer_metadata)).chunk(len(groups), dim=-1) if readable else ()
        for number, group in enumerate(groups):
            own = records[number].contiguous() if readable else None
            self._observer.received(group, slots, own, peer)
