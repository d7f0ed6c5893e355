"""Records of a server that prefills or decodes only, in memory that SGLang registers with its KV."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from canary_obs.copy_records.spliced_records import SplicedRecords
from canary_obs.engines.sglang.groups import FoundGroups, SglangGroup, draft_group, find_groups
from canary_obs.engines.sglang.ranks import attention_rank, first_head
from canary_obs.engines.sglang.speculation import draft_runners
from canary_obs.engines.toolkit.method_patches import MethodPatches
from canary_obs.errors import UnsupportedEngine

_SPLICED = "_kv_canary_spliced"  # of a scheduler: by group, its SplicedRecords
_FOUND = "_kv_canary_found"  # of a scheduler that is being built: its FoundGroups
# Components of state that are sent whole, by SGLang 0.5.23's name and by 0.5.16's: of all pages of a prompt,
# of those of its window, of its state.
_WHOLE, _WINDOWED, _STATES = ("BLOCK_SCALE", "DSA"), ("BLOCK_SCALE_SWA", "SWA"), ("MAMBA",)


def spliced_of(scheduler: Any) -> Mapping[str, SplicedRecords]:
    """By group, in the order of SGLang's components; empty = records do not travel."""
    found: Mapping[str, SplicedRecords] = vars(scheduler).get(_SPLICED, {})
    return found


def found_groups(scheduler: Any) -> FoundGroups:
    """Its groups; those found when its buffers were registered, the first time."""
    found: FoundGroups | None = vars(scheduler).pop(_FOUND, None)
    return found or _find_groups(scheduler)


def _find_groups(scheduler: Any) -> FoundGroups:
    return find_groups(scheduler.tp_worker.model_runner, first_head(scheduler), attention_rank(scheduler))


def draft_groups(scheduler: Any) -> tuple[SglangGroup, ...]:
    """Those of its draft models' KV, of which SGLang sends that of the first with the target's."""
    return tuple(draft_group(runner, first_head(scheduler)) for runner in draft_runners(scheduler))


@contextmanager
def spliced_buffers(scheduler: Any) -> Iterator[None]:
    """While a scheduler registers its buffers: one more component of state for each group's records.

    The other server has to have as many: SGLang refuses to send to one that has not.
    """
    from sglang.srt.disaggregation import decode, prefill
    from sglang.srt.disaggregation.base.conn import StateType
    from sglang.srt.disaggregation.utils import append_state_component

    with torch.inference_mode():  # as the buffers were created
        found = _find_groups(scheduler)
        drafts = draft_groups(scheduler)
    vars(scheduler)[_FOUND], groups = found, (*found.covered, *drafts)
    with torch.inference_mode(False):
        spliced = {group.view.name: _records_for(group) for group in groups}
    vars(scheduler)[_SPLICED] = spliced
    components = [(_component_of(group, StateType.__members__), spliced[group.view.name]) for group in groups]
    patches = MethodPatches()

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        def setup_state_kv_args(kv_args: Any, *more: Any, **named: Any) -> Any:
            result = original(kv_args, *more, **named)
            for kind, records in components:
                columns = zip(*records.buffers, strict=True)
                append_state_component(kv_args, kind, *(list(column) for column in columns))
            return result

        return setup_state_kv_args

    for module in (prefill, decode):
        patches.wrap(module, "setup_state_kv_args", around)
    try:
        yield
    finally:
        patches.restore()


def _components_of(group: SglangGroup) -> tuple[str, ...]:
    """Of SGLang's components of state, those that are sent with the same indices as the group's own bytes."""
    if group.by_row is not None:
        return _STATES
    return _WHOLE if group.view.window is None else _WINDOWED


def _component_of(group: SglangGroup, kinds: Mapping[str, Any]) -> Any:
    """The one that this SGLang has. Raises UnsupportedEngine if it has none."""
    names = _components_of(group)
    if not (known := [kinds[name] for name in names if name in kinds]):
        raise UnsupportedEngine(
            f"this SGLang sends {', '.join(kinds)} as state, and records of group {group.view.name} go with "
            f"{' or '.join(names)}: use a supported SGLang, or unset KV_CANARY_TRANSFER_RECORDS everywhere"
        )
    return known[0]


def is_whole(group: SglangGroup) -> bool:
    """Whether it has a slot for each token, or run of tokens, from the first one on."""
    return _components_of(group) == _WHOLE


def _records_for(group: SglangGroup) -> SplicedRecords:
    """Pages are the allocator's, by which SGLang sends: of several tokens' slots they have fewer."""
    if group.by_row is not None:
        return SplicedRecords(group.view.num_slots, 1, group.by_row.device)
    allocator = group.allocator
    return SplicedRecords(group.view.num_slots, int(allocator.page_size) // group.ratio, allocator.device)
