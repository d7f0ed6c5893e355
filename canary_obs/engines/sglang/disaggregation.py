"""Prefill and decode on different servers of SGLang: records travel with the KV, and are compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from canary_kernels.layout import FINGERPRINT_K, FINGERPRINT_V
from canary_obs.engine_api.observer import Observer
from canary_obs.engines.sglang.groups import SglangGroup, slots_of
from canary_obs.engines.sglang.request_rows import held_row, tokens_written
from canary_obs.engines.sglang.settings import settings_of
from canary_obs.engines.sglang.spliced_buffers import is_whole, spliced_of
from canary_obs.engines.sglang.states import state_slots
from canary_obs.engines.sglang.transfer_order import TransferOrder
from canary_obs.engines.toolkit.guarded import guarded
from canary_obs.engines.toolkit.method_patches import MethodPatches

_NOWHERE = "2.2.2.2"  # SGLang's own requests, which bring no KV
_SENT = "_kv_canary_sent"  # of a request: its _Sent


class _Sent(NamedTuple):
    """What a request was sent from so far."""

    tokens: int
    prints: Mapping[str, Tensor]  # by group: fingerprints as they were then, see `_prints`


_PRINTS = [FINGERPRINT_K, FINGERPRINT_V]
_NOTHING_SENT = _Sent(0, {})


class TransferHooks:
    """Fills the records of what a prefill server sends; compares what a decode server receives."""

    def __init__(
        self, scheduler: Any, groups: Mapping[str, SglangGroup], observer: Observer, order: TransferOrder
    ) -> None:
        self._scheduler, self._observer, self._order = scheduler, observer, order
        self._groups = groups
        self._table = scheduler.tp_worker.model_runner.req_to_token_pool.req_to_token
        self._spliced = spliced_of(scheduler)
        # K's fingerprint of what lies in a slot, int64 [num_slots], where a request was sent other bytes
        # for it; 0 = none was. The windows' KV leaves with its records.
        self._withheld = {
            name: torch.zeros(records.num_slots, dtype=torch.int64, device=self._table.device)
            for name, records in self._spliced.items()
            if is_whole(groups[name])
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
            if hasattr(allocating, "_send_kv_metadata"):  # SGLang 0.5.23
                patches.wrap(allocating, "_send_kv_metadata", self._around_metadata)

    def _around_send(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def send_kv_chunk(req: Any, last_chunk: bool = False, *more: Any, **named: Any) -> Any:
            if last_chunk:  # with it the components of state leave, of all tokens
                guarded(self._observer, "transfer", self._fill, req)
            result = original(req, last_chunk, *more, **named)
            guarded(self._observer, "transfer", self._note_sent, req)
            return result

        return send_kv_chunk

    def _around_pre_alloc(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def pre_alloc(req: Any, *more: Any, **named: Any) -> Any:
            slots = original(req, *more, **named)
            guarded(self._observer, "transfer", self._order.expect, req)
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
                self._overwrite(name, state_slots(request))
                continue
            own = slots.to(torch.int64) if group.own_slots is None else group.own_slots[slots].to(torch.int64)
            size = int(group.allocator.page_size)
            pages, held = torch.unique(own[own > 0] // size), size // group.ratio
            of_pages = torch.arange(held, device=pages.device)
            awaited = (pages[:, None] * held + of_pages).reshape(-1)
            self._overwrite(name, awaited)

    def _overwrite(self, name: str, slots: Tensor) -> None:
        with self._order.receiving(slots):
            if self._order.compares_overwritten:
                self._observer.before_load(name, slots)
            self._observer.invalidated(name, slots)

    def _redirect(self, state_pages: Any, cached: int) -> None:
        """Records of the first `cached` tokens, which this server has itself, go to page 0: nobody's.

        Of tokens that HiCache has yet to load the table still names slots of others, whose records these
        would replace. `state_pages`: of each component of state, whose last ones are the records.
        """
        for place, name in enumerate(reversed(list(self._spliced)), 1):
            group = self._groups[name]
            if cached and is_whole(group):
                pages = state_pages[-place].copy()  # it may be a view of the request table
                pages[: cached // int(group.allocator.page_size)] = 0
                state_pages[-place] = pages

    def _note_sent(self, request: Any) -> None:
        """What its chunks were sent from, from position 0 on."""
        known = vars(request).get(_SENT, _NOTHING_SENT)
        begin, end = known.tokens, int(getattr(request, "start_send_idx", 0))
        if end > begin:
            with self._order.sending(request, end):
                new = self._table[held_row(request), begin:end].to(torch.int64)
                found = {name: self._prints(name, new, begin) for name in self._withheld}
                if known.prints:
                    found = {name: torch.cat((known.prints[name], prints)) for name, prints in found.items()}
            vars(request)[_SENT] = _Sent(end, found)

    def _prints(self, name: str, slots: Tensor, first: int) -> Tensor:
        """int64 [n, 2]: fingerprints of K and V of a group's slots, by those of the table; 0 = unknown."""
        own = slots_of(self._groups[name], slots, first)
        found = self._observer.records_of(name, own)
        return own.new_zeros((own.shape[0], 2)) if found is None else found[:, _PRINTS]

    def _fill(self, request: Any) -> None:
        written = tokens_written(request)
        with self._order.sending(request, written) as settle:
            self._fill_in_order(request, written)
            settle()

    def _fill_in_order(self, request: Any, written: int) -> None:
        slots = self._table[held_row(request), :written].to(torch.int64)
        sent = vars(request).get(_SENT, _NOTHING_SENT)
        for name, records in self._spliced.items():
            group = self._groups[name]
            own = slots_of(group, slots) if group.by_row is None else state_slots(request)
            own = own[own > 0]
            found = self._observer.records_of(name, own)
            if found is not None and (withheld := self._withheld.get(name)) is not None:
                # Of tokens that two requests computed at once the tree keeps one's slots, and the other's
                # were sent: their bytes may differ in the last bits.
                prints = sent.prints.get(name, found[:0, _PRINTS])[: own.shape[0]]
                count = prints.shape[0]
                others = (found[:count, _PRINTS] != prints).any(1)
                withheld[own[:count][others]] = found[:count, FINGERPRINT_K][others]
                doubtful = (withheld[own] != 0) & (withheld[own] == found[:, FINGERPRINT_K])
                found = torch.where(doubtful[:, None], 0, found)
            records.fill(own, found)

    def _compare(self, request: Any, length: int) -> None:
        with self._order.arrived(request):
            self._compare_arrived(request, length)

    def _compare_arrived(self, request: Any, length: int) -> None:
        kept = request.kv if hasattr(request.kv, "cache_protected_len") else request  # SGLang 0.5.16
        first = int(kept.cache_protected_len)
        row = self._table[held_row(request), :length].to(torch.int64)
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
                earlier_slots = earlier[earlier > 0]
                with self._order.receiving(earlier_slots):
                    self._observer.invalidated(name, earlier_slots)
                own = own[earlier.shape[0] :]
            self._arrived(name, own[own > 0], peer, str(request.rid))

    def _arrived(self, name: str, slots: Tensor, peer: str, request: str) -> None:
        if (spliced := self._spliced.get(name)) is None:
            there, without, records = slots[:0], slots, None
        else:
            came, known = spliced.take(slots)
            there, without, records = slots[known], slots[~known], came[known]
        self.compared += int(there.numel())
        self.without += int(without.numel())
        if records is not None and there.numel():
            with self._order.receiving(there, records):
                self._observer.received(name, there, records, peer, request)
        if without.numel():
            with self._order.receiving(without):
                self._observer.received(name, without, peer=peer, request=request)


def _sent_length(request: Any) -> int:
    """Tokens whose KV is sent: the prompt's, and the answer's of a request that is computed anew."""
    answered = len(request.output_ids) if getattr(request, "pd_rebootstrap_in_progress", False) else 0
    return len(request.origin_input_ids) + answered
