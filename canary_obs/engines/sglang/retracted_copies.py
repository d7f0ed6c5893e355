"""Records that are kept with the copies which a decode server makes of requests that it takes back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from canary_kernels.layout import RECORD_WORDS
from canary_obs.engine_api.observer import Observer
from canary_obs.engines.sglang.groups import DRAFT, SglangGroup, slots_of
from canary_obs.engines.sglang.transfer_order import TransferOrder
from canary_obs.engines.toolkit.guarded import guarded
from canary_obs.engines.toolkit.method_patches import MethodPatches
from canary_obs.vocabulary import HOST_PEER


class _ListCopy(list[Any]):
    """A copy of one pool, with the records of its slots: they end together."""

    records: Mapping[str, Tensor]


class _DictCopy(dict[str, Any]):
    """A copy of a pool's parts, with the records of their slots."""

    records: Mapping[str, Tensor]


class _TupleCopy(tuple[Any, ...]):
    """The same, of a pool that has states as well."""

    records: Mapping[str, Tensor]


_NOT_COPIED = -1  # in all words of a record: the slot had nothing
_KINDS: dict[type, type[_ListCopy] | type[_DictCopy] | type[_TupleCopy]] = {
    list: _ListCopy, dict: _DictCopy, tuple: _TupleCopy,
}  # fmt: skip


class RetractedCopies:
    """Follows a slot allocator's copies to host memory and back: lists, dicts and tuples of tensors.

    A draft model's KV is not copied: its slots are not the request's until they are written again. States
    are copied by their own pool, see StateHooks.
    """

    def __init__(
        self, allocator: Any, groups: Mapping[str, SglangGroup], observer: Observer, order: TransferOrder
    ) -> None:
        self._allocator, self._observer, self._order = allocator, observer, order
        own = {name: group for name, group in groups.items() if group.by_row is None}
        self._groups = {name: group for name, group in own.items() if name != DRAFT}
        self._drafts = groups.get(DRAFT)
        self.compared = 0  # slots that came back with a record
        self.without = 0  # that came back without

    def wrap(self, patches: MethodPatches) -> None:
        """Follow from now on; `patches` undoes that. What was copied before has no records."""
        patches.wrap(self._allocator, "get_cpu_copy", self._around_copy)
        patches.wrap(self._allocator, "load_cpu_copy", self._around_load)

    def _around_copy(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def get_cpu_copy(indices: Tensor, *more: Any, **named: Any) -> Any:
            copy = original(indices, *more, **named)
            kind = _KINDS.get(type(copy))
            if kind is None:
                return copy
            kept = kind(copy)
            kept.records = {}
            guarded(self._observer, "host_tier", self._in_order, self._keep, kept, indices)
            return kept

        return get_cpu_copy

    def _around_load(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def load_cpu_copy(copy: Any, indices: Tensor, *more: Any, **named: Any) -> Any:
            guarded(self._observer, "host_tier", self._in_order, self._compare_before, indices)
            self._order.precede()
            result = original(copy, indices, *more, **named)
            guarded(self._observer, "host_tier", self._in_order, self._compare, copy, indices)
            return result

        return load_cpu_copy

    def _in_order(self, act: Callable[..., None], *given: Any) -> None:
        with self._order.receiving(*(one for one in given if isinstance(one, Tensor))):
            act(*given)

    def _keep(self, copy: Any, indices: Tensor) -> None:
        """Of each group's slots, in their order; zeros = no record."""
        records = {}
        for name, group in self._groups.items():
            slots = slots_of(group, indices.to(torch.int64))
            records[name] = kept = slots.new_zeros((slots.shape[0], RECORD_WORDS))
            copied = slots > 0
            if (found := self._observer.records_of(name, slots[copied])) is not None:
                kept[copied] = found
            kept[~copied] = _NOT_COPIED
        copy.records = records

    def _compare_before(self, indices: Tensor) -> None:
        for name, group in self._groups.items():
            slots = slots_of(group, indices.to(torch.int64))
            self._observer.before_load(name, slots[slots > 0])

    def _compare(self, copy: Any, indices: Tensor) -> None:
        for name, group in self._groups.items():
            slots = slots_of(group, indices.to(torch.int64))
            kept: Tensor | None = getattr(copy, "records", {}).get(name)
            if kept is None:
                kept = slots.new_zeros((slots.shape[0], RECORD_WORDS))
            kept, slots = kept[slots > 0], slots[slots > 0]
            left_out = (kept == _NOT_COPIED).all(1)  # a slot before the window had no copy
            if bool(left_out.any()):
                self._observer.invalidated(name, slots[left_out])
            known, unknown = kept.any(1) & ~left_out, ~kept.any(1)
            self.compared += int(known.sum())
            self.without += int(unknown.sum())
            if bool(known.any()):
                self._observer.received(name, slots[known], kept[known], HOST_PEER)
            if bool(unknown.any()):
                self._observer.received(name, slots[unknown])
        if self._drafts is not None:
            self._observer.invalidated(DRAFT, slots_of(self._drafts, indices.to(torch.int64)))
