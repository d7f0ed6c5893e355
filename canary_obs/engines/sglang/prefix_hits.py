"""Slots that join requests through SGLang's prefix cache: counted by SGLang, and shown to the canary."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from canary_obs.engine_api.observer import Observer
from canary_obs.engines.sglang.batch_views import EXTENDING
from canary_obs.engines.sglang.groups import SglangGroup, slots_of
from canary_obs.engines.sglang.request_rows import row_of
from canary_obs.engines.sglang.settings import settings_of
from canary_obs.engines.toolkit.guarded import guarded
from canary_obs.engines.toolkit.method_patches import MethodPatches

_CAME = "_kv_canary_came"  # of a decode server's request: its hits were counted


class PrefixHits:
    """Follows the batches of one scheduler. Hits are the tokens that a request has before its first chunk.

    Of a window they are those that the next token reads, and of compressed groups whole entries. States
    are copied to the request, and compared as copies.
    """

    def __init__(self, runner: Any, groups: Sequence[SglangGroup]) -> None:
        """`groups`: all of the scheduler's."""
        self._table: Tensor = runner.req_to_token_pool.req_to_token
        # Slots by group name since the start, once for each request that has joined them.
        self.counted = {group.view.name: 0 for group in groups}
        self._groups = [group for group in groups if group.by_row is None and group.view.sources]
        self._joined: list[tuple[int, int]] = []  # of the forward to come: row of a request, and its tokens
        self._decodes = False  # whether requests come from another server

    @property
    def waiting(self) -> bool:
        """Whether requests of the forward to come have hits that were not shown."""
        return bool(self._joined)

    def admit(self, batch: Any) -> None:
        """Count the hits of a batch that is about to run."""
        if self._decodes:
            self._count_missed(batch.reqs)
        if batch.forward_mode.name not in EXTENDING:
            return
        decoding = {id(request) for request in batch.decoding_reqs or ()}
        first = [int(each.extend_batch_idx) == 1 and id(each) not in decoding for each in batch.reqs]
        self._joined = _found(itertools.compress(zip(batch.reqs, batch.prefix_lens, strict=True), first))
        # By SGLang's own count of what it found when it admitted these requests.
        self._count(self._joined, int(batch.prefill_stats.log_hit_tokens))

    def wrap(self, patches: MethodPatches, scheduler: Any, observer: Observer) -> None:
        """Follow what a decode server finds in a cache of its own; `patches` undoes that.

        Its requests come without a forward, and are in the next one.
        """
        if settings_of(scheduler).disaggregation_mode != "decode":
            return
        self._decodes = True
        for request in scheduler.running_batch.reqs:
            vars(request)[_CAME] = True

        def around(original: Callable[..., Any]) -> Callable[..., Any]:
            def get_new_prebuilt_batch(*given: Any, **named: Any) -> Any:
                batch = original(*given, **named)
                if batch is not None:
                    guarded(observer, "step_view", self._come, batch)
                return batch

            return get_new_prebuilt_batch

        patches.wrap(scheduler, "get_new_prebuilt_batch", around)

    def _come(self, batch: Any) -> None:
        for request in batch.reqs:
            vars(request)[_CAME] = True
        joined = _found(zip(batch.reqs, batch.prefix_lens, strict=True))
        self._joined += joined
        self._count(joined, sum(tokens for _, tokens in joined))

    def _count_missed(self, requests: Sequence[Any]) -> None:
        """Those that came past `_come` have read what nobody has shown: at most what they have by now."""
        missed = [request for request in requests if _CAME not in vars(request)]
        if not missed:
            return
        found = [(0, _prefix_of(request)) for request in missed]
        self._count(found, sum(tokens for _, tokens in found))
        for request in missed:
            vars(request)[_CAME] = True

    def _count(self, joined: Sequence[tuple[int, int]], tokens: int) -> None:
        """`tokens`: of all that have joined, from their first one on."""
        for group in self._groups:
            if group.ratio > 1 or group.view.window is not None:
                tokens_read = (length - _first_read(group, length) for _, length in joined)
                self.counted[group.view.name] += sum(read // group.ratio for read in tokens_read)
            else:
                self.counted[group.view.name] += tokens

    def show(self, observer: Observer) -> None:
        """Have the bytes compared, of slots that several requests share once."""
        joined, self._joined = self._joined, []
        rows = [self._table[row, :tokens].to(torch.int64) for row, tokens in joined]
        for group in self._groups:
            firsts = [_first_read(group, row.shape[0]) for row in rows]
            found = [slots_of(group, row[first:], first) for row, first in zip(rows, firsts, strict=True)]
            slots = torch.cat(found).to(torch.int64)
            observer.hit(group.view.name, _each_once(slots) if len(found) > 1 else slots)


def _found(requests: Iterable[tuple[Any, int]]) -> list[tuple[int, int]]:
    """The rows and tokens of those that have some."""
    found = [(row_of(request), int(tokens)) for request, tokens in requests if tokens]
    return [(row, tokens) for row, tokens in found if row is not None]


def _prefix_of(request: Any) -> int:
    """Tokens of it that are cached."""
    if hasattr(request, "prefix_len"):
        return int(request.prefix_len)
    # SGLang 0.5.16
    return len(request.prefix_indices)


def _first_read(group: SglangGroup, tokens: int) -> int:
    """The first of so many tokens that the next one reads."""
    return 0 if group.view.window is None else max(tokens - group.view.window + 1, 0)


def _each_once(slots: Tensor) -> Tensor:
    """int64 [n]: these slots in order, -1 in place of those that come again. The device is not waited for."""
    ordered = slots.sort().values
    again = torch.zeros_like(ordered, dtype=torch.bool)
    torch.eq(ordered[1:], ordered[:-1], out=again[1:])
    return ordered.masked_fill_(again, -1)
