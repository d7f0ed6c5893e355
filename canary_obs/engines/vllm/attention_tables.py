"""Compares the block tables and slot mappings that vLLM gave to attention with those of its model runner."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from canary_obs.engine_api.views import ComparedTables, GroupStep
from canary_obs.engines.vllm.groups import VllmGroup

_NO_LAYERS = "its metadata is not one per layer, as with micro-batches"
_Layers = Callable[[Mapping[str, Any]], Sequence[Any]]


class AttentionTables:
    """Shows attention's own tables to the canary where they are not the runner's tensors.

    As a rule they are the same memory, and comparing addresses is all. Else the slots of every request are
    verified as attention has them: an entry that matters and differs does not continue the request there.
    """

    def __init__(self, groups: Sequence[VllmGroup]) -> None:
        """`groups`: those of states are left out, and a draft model's: drafting has tables of its own."""
        own = [group for group in groups if not (group.draft or group.states)]
        self._of_entries = [group.view.name for group in own if not group.of_tokens]
        names = [group.view.name for group in own]
        self._layers = {group.view.name: _values_of(group.layers) for group in own}
        self._compared = dict.fromkeys(names, 0)
        self._gaps: dict[str, str | None] = dict.fromkeys(names)
        self._tables: dict[str, Tensor] = {}  # copies of attention's
        self._slots: dict[str, Tensor] = {}

    @property
    def counts(self) -> dict[str, ComparedTables]:
        """Forwards whose tables were compared, by group."""
        return {name: ComparedTables(count, self._gaps[name]) for name, count in self._compared.items()}

    def given(
        self, metadata: Any, mappings: Any, steps: dict[str, GroupStep], total: int
    ) -> dict[str, GroupStep]:
        """What a forward of `total` tokens was given: `steps`, or a copy with attention's own tables.

        metadata and mappings by layer name; mappings are slot mappings, None = those in the metadata.
        """
        shown = steps
        for name, layers in self._layers.items():
            try:
                if name in self._of_entries:  # their slots are attention's own
                    step, complete = self._table_of_entries(name, layers(metadata), steps[name])
                else:
                    own, written = layers(metadata), layers(mappings) if mappings else ()
                    step, complete = steps[name], True
                    if not _same_memory(own, written, step):
                        step, complete = self._group(name, own, written, step, total)
            except Exception as error:  # noqa: BLE001 - the engine's data may have any form
                self._gaps[name] = _said(error) if isinstance(metadata, Mapping) else _NO_LAYERS
                continue
            if step is not steps[name]:
                shown = {**shown, name: step}
            if complete:
                self._compared[name] += 1
            else:
                self._gaps[name] = "its layers have several tables that are not the runner's"
        return shown

    def entry_mappings(self, metadata: Any, total: int) -> dict[str, Tensor]:
        """Of each group of compressed entries: where a forward's tokens write theirs, int64 [total].

        By the metadata of the group's first layer; `given` counts only forwards where it is that of all.
        """
        return {name: self._layers[name](metadata)[0].slot_mapping[:total] for name in self._of_entries}

    def _table_of_entries(
        self, name: str, metadata: Sequence[Any], step: GroupStep
    ) -> tuple[GroupStep, bool]:
        distinct = _distinct(metadata)
        step, one_table = self._with_table(name, distinct, step)
        first, *others = [found.slot_mapping for found in distinct]
        return step, one_table and all(torch.equal(first, other) for other in others)

    def _group(
        self, name: str, metadata: Sequence[Any], mappings: Sequence[Any], step: GroupStep, total: int
    ) -> tuple[GroupStep, bool]:
        """The step as attention has it, and whether that holds for all layers."""
        slots = step.out_slots
        distinct, written = _distinct(metadata), _distinct(mappings)
        for found in distinct:
            if (mapping := getattr(found, "slot_mapping", None)) is not None:
                written.append(mapping)
        others = {at: found for found in written if (at := found.data_ptr()) != slots.data_ptr()}
        step, one_table = self._with_table(name, distinct, step)
        if others:
            step = replace(step, out_slots=self._mapping(name, next(iter(others.values())), slots, total))
        return step, one_table and len(others) < 2

    def _with_table(self, name: str, distinct: Sequence[Any], step: GroupStep) -> tuple[GroupStep, bool]:
        """The step with attention's own table, if it has one, and whether it has no second one."""
        own = step.slot_table
        tables = [parts for found in distinct if _differ(parts := _parts(found, own), own)]
        if tables:
            step = replace(step, slot_table=self._table(name, tables[0], own))
        return step, len(tables) < 2

    def _table(self, name: str, parts: Sequence[tuple[int, Tensor]], own: Tensor) -> Tensor:
        # On the forward's stream, and kept: attention's may be gone before the side stream has read it.
        if name not in self._tables or self._tables[name].shape[0] < own.shape[0]:
            self._tables[name] = torch.zeros_like(own)
        whole = self._tables[name][: own.shape[0]]
        for row, part in parts:
            whole[row : row + part.shape[0]].copy_(part[: whole.shape[0] - row])
        return whole

    def _mapping(self, name: str, found: Tensor, own: Tensor, total: int) -> Tensor:
        if name not in self._slots or self._slots[name].shape[0] < total:
            self._slots[name] = torch.empty_like(own)
        return self._slots[name][:total].copy_(found[:total])


def _same_memory(metadata: Sequence[Any], mappings: Sequence[Any], step: GroupStep) -> bool:
    """Whether all layers share the runner's own table and slots, as is usual; False = look closer."""
    first, own = metadata[0], step.slot_table
    table, slots = getattr(first, "block_table", None), getattr(first, "slot_mapping", None)
    slots_at = step.out_slots.data_ptr()
    return (
        table is not None
        and table.data_ptr() == own.data_ptr()
        and table.stride() == own.stride()
        and table.shape[1] == own.shape[1]
        and (slots is None or slots.data_ptr() == slots_at)
        and len(set(map(id, metadata))) == 1
        and (not mappings or (len(set(map(id, mappings))) == 1 and mappings[0].data_ptr() == slots_at))
    )


def _values_of(layers: Sequence[str]) -> _Layers:
    if len(layers) > 1:
        return itemgetter(*layers)
    (layer,) = layers
    return lambda found: (found[layer],)


def _distinct(found: Sequence[Any]) -> list[Any]:
    """The objects that layers have, each once; as a rule they share one."""
    if len(set(map(id, found))) < 2:
        return list(found[:1])
    return list({id(one): one for one in found}.values())


def _parts(metadata: Any, own: Tensor) -> Sequence[tuple[int, Tensor]]:
    """The tables in a layer's metadata, each with the row of its first request."""
    table = getattr(metadata, "block_table", None)
    if table is not None:
        parts = [(0, table)]
    else:
        # Backends that compute decodes and prefills apart have a slice for each.
        decode, prefill = getattr(metadata, "decode", None), getattr(metadata, "prefill", None)
        parts = [] if decode is None else [(0, _table_of(decode))]
        if prefill is not None:
            parts.append((metadata.num_decodes, _table_of(prefill)))
        if decode is not None and parts[0][1].shape[0] != metadata.num_decodes:
            raise LookupError(f"{type(metadata).__name__} has a row per token, not per request")
    if not parts:
        raise LookupError(f"{type(metadata).__name__} has no table")
    for _, part in parts:
        if part.shape[1] != own.shape[1]:
            raise LookupError(f"{type(metadata).__name__} has a table for blocks of another size")
    return parts


def _table_of(part: Any) -> Tensor:
    for name in ("block_table", "block_tables"):
        table: Tensor | None = getattr(part, name, None)
        if table is not None:
            return table
    raise LookupError(f"{type(part).__name__} has no table")


def _differ(parts: Sequence[tuple[int, Tensor]], own: Tensor) -> bool:
    """Whether a part is other memory than the runner's rows."""
    start, row = own.data_ptr(), own.stride(0) * own.element_size()
    return any(
        part.data_ptr() != start + first * row or (part.shape[0] > 1 and part.stride(0) != own.stride(0))
        for first, part in parts
    )


def _said(error: Exception) -> str:
    if isinstance(error, LookupError) and not isinstance(error, KeyError):
        return str(error)
    return f"{type(error).__name__}: {error}"
