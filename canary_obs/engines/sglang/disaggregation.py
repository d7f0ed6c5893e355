"""Prefill and decode on different servers of SGLang: records travel with the KV, and are compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from canary_kernels.layout import FINGERPRINT_K, FINGERPRINT_V
from canary_obs.copy_records.spliced_records import SplicedRecords
from canary_obs.engine_api.observer import Observer
from canary_obs.engines.sglang.groups import (
    FoundGroups,
    SglangGroup,
    draft_group,
    find_groups,
    slots_of,
)
from canary_obs.engines.sglang.ranks import attention_rank, first_head
from canary_obs.engines.sglang.settings import settings_of
from canary_obs.engines.sglang.speculation import draft_runners
from canary_obs.engines.sglang.states import state_slots
from canary_obs.engines.toolkit.guarded import guarded
from canary_obs.engines.toolkit.method_patches import MethodPatches

_NOWHERE = "2.2.2.2"  # SGLang's own requests, which bring no KV
_SENT = "_kv_canary_sent"  # of a request: its _Sent
_SPLICED = "_kv_canary_spliced"  # of a scheduler: by group, its SplicedRecords
_FOUND = "_kv_canary_found"  # of a scheduler that is being built: its FoundGroups
# Components of state that are sent whole: of all pages of a prompt, of those of its window, of its state.
_WHOLE, _WINDOWED, _STATES = "BLOCK_SCALE", "BLOCK_SCALE_SWA", "MAMBA"


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
    components = [(StateType[_component_of(group)], spliced[group.view.name]) for group in groups]
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


class _Sent(NamedTuple):
    """What a request was sent from so far."""

    tokens: int
    prints: Mapping[str, Tensor]  # by group: fingerprints as they were then, see `_prints`


_PRINTS = [FINGERPRINT_K, FINGERPRINT_V]
_NO_PRINTS = torch.empty((0, 2), dtype=torch.int64)
_NOTHING_SENT = _Sent(0, {})


class TransferHooks:
    """Fills the records of what a prefill server sends; compares what a decode server receives."""

    def __init__(self, scheduler: Any, groups: Mapping[str, SglangGroup], observer: Observer) -> None:
        self._scheduler, self._observer = scheduler, observer
        self._groups = groups
        self._table = scheduler.tp_worker.model_runner.req_to_token_pool.req_to_token
        self._spliced: Mapping[str, SplicedRecords] = vars(scheduler).get(_SPLICED, {})
        # K's fingerprint of what lies in a slot, int64 [num_slots], where a request was sent other bytes
        # for it; 0 = none was. The windows' KV leaves with its records.
        self._withheld = {
            name: torch.zeros(records.num_slots, dtype=torch.int64)
            for name, records in self._spliced.items()
            if _is_whole(groups[name])
        }
        self.compared = 0  # slots that arrived with a record
        self.without = 0  # that arrived without

    def wrap(self, patches: MethodPatches) -> None:
        """Follow transfers from now on; `patches` undoes that."""
        if settings_of(self._scheduler).disaggregation_mode == "prefill":
            patches.wrap(self._scheduler, "send_kv_chunk", self._around_send)
        else:
            queue = self._scheduler.disagg_decode_transfer_queue
            patches.wrap(queue, "_commit_transfer_to_req", self._around_commit)
            allocating = self._scheduler.disagg_decode_prealloc_queue
            patches.wrap(allocating, "_pre_alloc", self._around_pre_alloc)
            patches.wrap(allocating, "_send_kv_metadata", self._around_metadata)

    def _around_send(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def send_kv_chunk(req: Any, *more: Any, **named: Any) -> Any:
            # Components of state leave with the last chunk, of all tokens: those before have their records.
            guarded(self._observer, "transfer", self._fill, req)
            result = original(req, *more, **named)
            guarded(self._observer, "transfer", self._note_sent, req)
            return result

        return send_kv_chunk

    def _around_pre_alloc(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def pre_alloc(req: Any, *more: Any, **named: Any) -> Any:
            slots = original(req, *more, **named)
            guarded(self._observer, "transfer", self._expect, req, slots)
            return slots

        return pre_alloc

    def _around_metadata(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def send_kv_metadata(
            decode_req: Any, slots: Any, page_size: int, state_pages: Any = None, **named: Any
        ) -> Any:
            cached = int(named.get("decode_prefix_len") or 0)
            guarded(self._observer, "transfer", self._redirect, state_pages, cached)
            return original(decode_req, slots, page_size, state_pages, **named)

        return send_kv_metadata

    def _around_commit(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def commit(decode_req: Any, *more: Any, **named: Any) -> Any:
            # Before the call, which appends the next token.
            length = guarded(self._observer, "transfer", _sent_length, decode_req.req)
            result = original(decode_req, *more, **named)
            if length is not None:
                guarded(self._observer, "transfer", self._compare, decode_req.req, length)
            return result

        return commit

    def _expect(self, request: Any, slots: Tensor) -> None:
        """Whole pages arrive in these slots of the table, int64 [n], at any time until they are committed."""
        for name, group in self._groups.items():
            if group.by_row is not None:
                self._observer.before_load(name, own := state_slots(request))
                self._observer.invalidated(name, own)
                continue
            own = slots.to(torch.int64) if group.own_slots is None else group.own_slots[slots].to(torch.int64)
            size = int(group.allocator.page_size)
            pages, held = torch.unique(own[own > 0] // size), size // group.ratio
            of_pages = torch.arange(held, device=pages.device)
            awaited = (pages[:, None] * held + of_pages).reshape(-1)
            self._observer.before_load(name, awaited)
            self._observer.invalidated(name, awaited)

    def _redirect(self, state_pages: Any, cached: int) -> None:
        """Records of the first `cached` tokens, which this server has itself, go to page 0: nobody's.

        Of tokens that HiCache has yet to load the table still names slots of others, whose records these
        would replace. `state_pages`: of each component of state, whose last ones are the records.
        """
        for place, name in enumerate(reversed(list(self._spliced)), 1):
            group = self._groups[name]
            if cached and _is_whole(group):
                pages = state_pages[-place].copy()  # it may be a view of the request table
                pages[: cached // int(group.allocator.page_size)] = 0
                state_pages[-place] = pages

    def _note_sent(self, request: Any) -> None:
        """What its chunks were sent from, from position 0 on."""
        known = vars(request).get(_SENT, _NOTHING_SENT)
        begin, end = known.tokens, int(getattr(request, "start_send_idx", 0))
        if end > begin:
            new = self._table[request.kv.req_pool_idx, begin:end].to(torch.int64)
            prints = {
                name: torch.cat((known.prints.get(name, _NO_PRINTS), self._prints(name, new, begin)))
                for name in self._withheld
            }
            vars(request)[_SENT] = _Sent(end, prints)

    def _prints(self, name: str, slots: Tensor, first: int) -> Tensor:
        """int64 [n, 2]: fingerprints of K and V of a group's slots, by those of the table; 0 = unknown."""
        own = slots_of(self._groups[name], slots, first)
        found = self._observer.records_of(name, own)
        return own.new_zeros((own.shape[0], 2)) if found is None else found[:, _PRINTS]

    def _fill(self, request: Any) -> None:
        slots = self._table[request.kv.req_pool_idx, : self._written(request)].to(torch.int64)
        sent = vars(request).get(_SENT, _NOTHING_SENT)
        for name, records in self._spliced.items():
            group = self._groups[name]
            own = slots_of(group, slots) if group.by_row is None else state_slots(request)
            own = own[own > 0]
            found = self._observer.records_of(name, own)
            if found is not None and (withheld := self._withheld.get(name)) is not None:
                # Of tokens that two requests computed at once the tree keeps one's slots, and the other's
                # were sent: their bytes may differ in the last bits.
                prints = sent.prints.get(name, _NO_PRINTS)[: own.shape[0]]
                count = prints.shape[0]
                others = (found[:count, _PRINTS] != prints).any(1)
                withheld[own[:count][others]] = found[:count, FINGERPRINT_K][others]
                doubtful = (withheld[own] != 0) & (withheld[own] == found[:, FINGERPRINT_K])
                found = torch.where(doubtful[:, None], 0, found)
            records.fill(own, found)

    @staticmethod
    def _written(request: Any) -> int:
        return min(int(request.extend_end), len(request.origin_input_ids))

    def _compare(self, request: Any, length: int) -> None:
        first = int(request.kv.cache_protected_len)
        row = self._table[request.kv.req_pool_idx, :length].to(torch.int64)
        sent = request.bootstrap_host != _NOWHERE
        peer = f"{request.bootstrap_host}:{request.bootstrap_port}" if sent else ""
        for name, group in self._groups.items():
            if group.by_row is not None:
                own = state_slots(request)
                if not sent and name in self._spliced:
                    self._spliced[name].fill(own, None)
                self._arrived(name, own, peer, str(request.rid))
                continue
            cached = slots_of(group, row if not sent else row[:first])
            if name in self._spliced:  # what came for them is of no use, and would be old the next time
                self._spliced[name].fill(cached[cached > 0], None)
            own = slots_of(group, row[first:], first)
            if group.view.window is not None:
                # Whole pages are sent. Of the tokens before nothing was, also where they have a slot.
                begun = max(length - group.view.window + 1, 0)
                earlier = own[: max(begun - begun % int(group.allocator.page_size) - first, 0)]
                self._observer.invalidated(name, earlier[earlier > 0])
                own = own[earlier.shape[0] :]
            self._arrived(name, own[own > 0], peer, str(request.rid))

    def _arrived(self, name: str, slots: Tensor, peer: str, request: str) -> None:
        spliced = self._spliced.get(name)
        if spliced is None:
            known = torch.zeros(slots.shape, dtype=torch.bool)
        else:
            records, known = spliced.take(slots)
        self.compared += (compared := int(known.sum()))
        self.without += int(slots.numel()) - compared
        if compared:
            self._observer.received(name, slots[known], records[known], peer, request)
        if compared < slots.numel():
            self._observer.received(name, slots[~known], peer=peer, request=request)


def _sent_length(request: Any) -> int:
    """Tokens whose KV is sent: the prompt's, and the answer's of a request that is computed anew."""
    answered = len(request.output_ids) if getattr(request, "pd_rebootstrap_in_progress", False) else 0
    return len(request.origin_input_ids) + answered


def _component_of(group: SglangGroup) -> str:
    """Of SGLang's components of state, one that is sent with the same indices as the group's own bytes."""
    if group.by_row is not None:
        return _STATES
    return _WHOLE if group.view.window is None else _WINDOWED


def _is_whole(group: SglangGroup) -> bool:
    """Whether it has a slot for each token, or run of tokens, from the first one on."""
    return _component_of(group) == _WHOLE


def _records_for(group: SglangGroup) -> SplicedRecords:
    """Pages are the allocator's, by which SGLang sends: of several tokens' slots they have fewer."""
    if group.by_row is not None:
        return SplicedRecords(group.view.num_slots, 1, group.by_row.device)
    allocator = group.allocator
    return SplicedRecords(group.view.num_slots, int(allocator.page_size) // group.ratio, allocator.device)
