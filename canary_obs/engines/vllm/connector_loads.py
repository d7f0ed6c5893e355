"""Blocks that a KV connector fills: from the announcement of a load to the report that it is complete."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from canary_obs.engine_api.loads import ArrivedBlocks
from canary_obs.engine_api.observer import Observer
from canary_obs.engines.toolkit.block_slots import slots_of
from canary_obs.engines.toolkit.later import Later
from canary_obs.engines.vllm.groups import VllmGroup
from canary_obs.engines.vllm.loaded_blocks import (
    BlockRows,
    arrived_blocks,
    first_token,
    loaded_blocks,
    rows_of,
)
from canary_obs.engines.vllm.pool_events import BlockEvent, LaterTokens, Loaded, LoadTokens
from canary_obs.engines.vllm.sent_copies import Copies, KnownCopies
from canary_obs.engines.vllm.window_tables import NULL_BLOCK
from canary_obs.runtime.device.uploads import uploaded


class _Expected(NamedTuple):
    """What is to arrive in a group's blocks, as far as it is known while the copies are made."""

    sent: KnownCopies
    puts: int  # of `Copies` by then; as many later: nothing else was said
    arrived: ArrivedBlocks  # if all of it arrives


class ConnectorLoads:
    """Follows loads by the scheduler's outputs and by what the connector reports of them.

    A request that is scheduled along with its load is loaded by the forward itself, layer by layer: its bytes
    are there when that step has ended. Else the request waits until the connector reports the load.
    Connectors write whole blocks, also where the match ends inside one, so whole blocks are awaited. States
    are awaited as well, and get a baseline when they have arrived: nobody says whose they are to be.
    """

    def __init__(self, groups: Sequence[VllmGroup], device: torch.device) -> None:
        self._groups, self._device = groups, device
        self._waiting: dict[str, list[Loaded]] = {}  # by request; until it is scheduled
        self._open: set[str] = set()  # those of them whose arrival was not reported yet
        # Of those, with tokens: not begun yet, as their copies have not been submitted.
        self._due: list[tuple[str, list[Loaded], LaterTokens]] = []
        # With the forward of the step under way, which may be reported as failed after it: loads, computed.
        self.landing: dict[str, tuple[list[Loaded], int]] = {}
        self.failed: set[int] = set()  # blocks that the connector could not load
        # Of those, slots by group that the step under way has read: vLLM computes that step again.
        self._stale: list[tuple[str, Tensor]] = []
        # By request that waits and group: what is to arrive.
        self._expected: dict[str, dict[str, _Expected]] = {}
        self._sizes = {group.number: group.block_size for group in groups}
        self.copies = Copies()  # what is known of the copies that are on their way
        # By request of the step under way: the first token that was loaded, not found in the prefix cache.
        self.loaded_from: dict[str, int] = {}

    def begin_step(self, output: Any, events: Iterable[BlockEvent] | None, observer: Observer) -> None:
        """Before the forward of a scheduler output."""
        self.begin_due(observer)
        for request in self.landing:  # of a step that failed: nobody knows what has arrived
            observer.load_dropped(request)
        self.landing = {}
        self.loaded_from = {}
        for name, slots in self._stale:
            observer.invalidated(name, slots)
        self._stale = []
        events = events or ()
        found = Loaded in set(map(type, events))  # a long prompt has displaced hundreds of blocks
        started = [event for event in events if isinstance(event, Loaded)] if found else []
        if not (started or self._waiting):
            return
        self._compare_before(started, observer)
        for request in output.finished_req_ids | (output.preempted_req_ids or set()):
            if self._waiting.pop(request, None) is not None:
                self._open.discard(request)
                self._expected.pop(request, None)
                observer.load_dropped(request)
        computed = _computed_tokens(output)
        for request in self._waiting.keys() & computed.keys():
            loads = self._waiting.pop(request)
            self.loaded_from[request] = self._first_token(loads)
            if request in self._open:  # scheduled, and so complete, without a report
                for name, slots in self._end(request, loads, computed[request], observer):
                    observer.invalidated(name, slots)
        tokens = {event.request: event.tokens for event in events if isinstance(event, LoadTokens)}
        for request, loads in _by_request(started).items():
            self._forget_copies(loads)
            if request in computed:
                self._begin(request, loads, _given(tokens.get(request)), observer)
                self.loaded_from[request] = self._first_token(loads)
                self.landing[request] = loads, computed[request]
            else:
                self._waiting[request] = loads
                self._open.add(request)
                self._due.append((request, loads, tokens.get(request)))

    @property
    def open(self) -> bool:
        """Whether a load is under way, or the last step has had one."""
        return bool(self._waiting or self.landing or self._stale or self._due or self.loaded_from)

    def begin_due(self, observer: Observer) -> None:
        """Begin the loads of requests that wait for them: once the runner has submitted their copies.

        A GPU makes the copies meanwhile. No forward reads or writes their blocks before they are reported.
        """
        due, self._due = self._due, []
        ends, self.copies.ends = self.copies.ends, []
        for request, loads, tokens in due:
            self._begin(request, loads, _given(tokens), observer, ends)

    def rewritten(self, load: str, blocks: Sequence[Loaded], tokens: bytes, observer: Observer) -> None:
        """The step that has begun writes these blocks again, which were found in the prefix cache."""
        self._compare_before(blocks, observer)
        self._forget_copies(blocks)
        self._begin(load, blocks, tokens, observer)
        self.landing[load] = list(blocks), len(tokens) // 4  # int32

    def end_step(self, observer: Observer) -> None:
        """After the forward, on a stream that waits for it."""
        if self.landing:
            landing, self.landing = self.landing, {}
            for request, (loads, computed) in landing.items():
                self._stale += self._end(request, loads, computed, observer)
        if self.failed and not self._waiting:
            self.failed.clear()

    def reported(
        self, finished: Iterable[str], failed: Iterable[str], blocks: Iterable[int], observer: Observer
    ) -> None:
        """The connector reported requests whose loads are complete, some of them failed, and failed blocks.

        Before anything reads what was loaded.
        """
        self.begin_due(observer)
        self.failed.update(blocks)
        lost = set(failed)
        for request in finished:
            if request in self._open and request in lost:
                self._open.discard(request)
                self._expected.pop(request, None)
                del self._waiting[request]  # when it is scheduled, nothing in its blocks was loaded
                observer.load_failed(request)
            elif request in self._open:
                for name, slots in self._end(request, self._waiting[request], None, observer):
                    observer.invalidated(name, slots)

    def _compare_before(self, loads: Sequence[Loaded], observer: Observer) -> None:
        """What lies in their blocks is compared for the last time: nothing has been submitted yet."""
        for group, own in self._by_group(loads):
            blocks = list(chain.from_iterable(load.blocks for load in own))
            if NULL_BLOCK in blocks:
                blocks = [block for block in blocks if block != NULL_BLOCK]
            if blocks:
                observer.before_load(group.view.name, self._slots_of(blocks, group))

    def _forget_copies(self, loads: Sequence[Loaded]) -> None:
        """What is known of their blocks is of loads that have failed, or never arrived."""
        if self.failed:
            self.failed.difference_update(*(load.blocks for load in loads))
        for group, own in self._by_group(loads):
            for load in own:
                self.copies.forget(group.view.name, load.blocks)

    def _by_group(self, loads: Sequence[Loaded]) -> Iterator[tuple[VllmGroup, list[Loaded]]]:
        for group in self._groups:
            if own := [load for load in loads if load.group == group.number]:
                yield group, own

    def _begin(
        self, request: str, loads: Sequence[Loaded], tokens: bytes | None, observer: Observer,
        ends: Sequence[torch.Event | None] | None = None,
    ) -> None:  # fmt: skip
        """`ends`: of the jobs that copy the loads that begin; None = the forward loads it."""
        for group, own in self._by_group(loads):
            rows = rows_of(own, group)
            expected = None if ends is None else self._expect(request, group, rows)
            blocks = loaded_blocks(rows, group, tokens, expected, _copied(expected, ends or ()))
            # Whatever another of vLLM's groups kept in these blocks is overwritten as well. Layers of a draft
            # are in the target's group, and have memory of their own.
            for other in self._groups:
                if other.number != group.number:
                    observer.invalidated(other.view.name, self._slots_of(rows.blocks.tolist(), other))
            observer.load_begun(request, group.view.name, blocks)

    def _expect(self, request: str, group: VllmGroup, rows: BlockRows) -> ArrivedBlocks | None:
        """What will have arrived when the load is complete, if the copies are known by now."""
        sent = self.copies.take(group.view.name, rows.blocks)
        arrived = arrived_blocks(rows, group, None, rows.among(()), sent)
        expected = _Expected(sent, self.copies.puts, arrived)
        self._expected.setdefault(request, {})[group.view.name] = expected
        return arrived if sent.counts.any() else None

    def _end(
        self, request: str, loads: Sequence[Loaded], computed: int | None, observer: Observer
    ) -> list[tuple[str, Tensor]]:
        """Slots of blocks that could not be loaded, by group: they must be written before they are read.

        What is computed from `computed` on is written by the forward; None = there was none yet.
        """
        self._open.discard(request)
        missing, expected = [], self._expected.pop(request, {})
        for group, own in self._by_group(loads):
            name, known = group.view.name, expected.get(group.view.name)
            if known is not None and computed is None and not self.failed and known.puts == self.copies.puts:
                observer.load_ended(request, name, known.arrived)
                continue
            rows = rows_of(own, group)
            failed, sent = rows.among(self.failed), self.copies.take(name, rows.blocks)
            sent = sent if known is None else known.sent.with_later(sent)
            arrived = arrived_blocks(rows, group, computed, failed, sent)
            observer.load_ended(request, name, arrived)
            if failed.any():
                lost = rows.blocks[failed].tolist()
                missing.append((name, self._slots_of(lost, group)))
        return missing

    def _slots_of(self, blocks: Sequence[int], group: VllmGroup) -> Tensor:
        return uploaded(slots_of(blocks, group.block_slots), self._device)

    def _first_token(self, loads: Sequence[Loaded]) -> int:
        return min(first_token(load, self._sizes[load.group]) for load in loads if load.group in self._sizes)


def _copied(expected: ArrivedBlocks | None, ends: Sequence[torch.Event | None]) -> Sequence[torch.Event]:
    """After these the load is there: each of its blocks is in a job of which that is known."""
    known = [end for end in ends if end is not None]
    if expected is None or len(known) < len(ends) or not bool((expected.filled > 0).all()):
        return ()
    return known


def _given(tokens: LaterTokens) -> bytes | None:
    return tokens.get() if isinstance(tokens, Later) else tokens


def _computed_tokens(output: Any) -> dict[str, int]:
    """Tokens that are in the cache before this output's forward, by scheduled request."""
    found = {new.req_id: int(new.num_computed_tokens) for new in output.scheduled_new_reqs}
    cached = output.scheduled_cached_reqs
    found.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return found


def _by_request(loads: Iterable[Loaded]) -> dict[str, list[Loaded]]:
    found: dict[str, list[Loaded]] = {}
    for load in loads:
        found.setdefault(load.request, []).append(load)
    return found
