"""Shows which requests a scheduler output begins, ends or gives blocks to, and nothing else."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import compress
from typing import Any

import numpy as np

from canary_obs.engine_api.adapter import EngineAdapter
from canary_obs.engine_api.observer import Observer
from canary_obs.engine_api.requests import (
    AddedBlocks,
    BlockTable,
    ChangedRequests,
    GrownBlocks,
    RequestChange,
    StoredIn,
)
from canary_obs.engines.vllm.connector_reports import ConnectorReports
from canary_obs.engines.vllm.forward_count import ForwardCount
from canary_obs.engines.vllm.groups import VllmGroup
from canary_obs.engines.vllm.window_tables import NULL_BLOCK
from canary_obs.errors import KVCacheViolation
from canary_obs.slot_facts import request_name


class RequestChanges:
    """Follows scheduler outputs."""

    def __init__(self, groups: Sequence[VllmGroup], *, rewrites: bool, ahead: bool = False) -> None:
        """`rewrites`: drafted tokens that are rejected are written over.

        `ahead`: an output is scheduled before the results of the one before it are known.
        """
        self.tables = {
            group.view.name: BlockTable(
                str(group.number), group.block_slots, group.block_size, rewritten=group.states
            )
            for group in groups
        }
        self._sizes = {group.number: group.block_size for group in groups}
        self._rewrites, self._ahead = rewrites, ahead
        self._prompts: dict[str, int] = {}  # by request that has not ended
        self._lengths: dict[str, dict[int, int]] = {}  # of its block lists, by number of the group
        self._last: Any = None  # output with tokens before this one
        self.due: Callable[[], None] | None = None  # the `report` of an output, after its forward's launch
        # Of an adapter that has no other: block lists by request, which `grow` adds to.
        self.lists: Mapping[str, Sequence[list[int]]] | None = None

    def defer(self, output: Any, loaded_from: Mapping[str, int], observer: Observer) -> None:
        """`report` an output when `settle` is called.

        Nothing of it is needed for the forward, which waits for what precedes its launch.
        """
        self.due = partial(self.report, output, loaded_from, observer, observer.step)

    def settle(self) -> None:
        """Show what is `due`."""
        due, self.due = self.due, None
        if due is not None:
            due()

    def report(
        self, output: Any, loaded_from: Mapping[str, int], observer: Observer, step: int | None = None
    ) -> None:
        """Show the changes of an output, before the forward that it schedules, or with the `step` before it.

        `loaded_from`: by request, the first token that a connector loads or has loaded.
        """
        cached, last = output.scheduled_cached_reqs, self._last
        gone = output.finished_req_ids | (output.preempted_req_ids or set())
        if gone or output.scheduled_new_reqs or cached.new_block_ids.count(None) != len(cached.new_block_ids):
            ended = {name: self._emitted(last, name) for name in gone}
            for name in output.finished_req_ids:
                self._prompts.pop(name, None)
                self._lengths.pop(name, None)
            changed, grown = list(self._begun(output, loaded_from)), dict[str, GrownBlocks]()
            self._go_on(cached, loaded_from, changed, grown)
            if output.kv_cache_block_copies:
                changed += _originals(changed, dict(pair[::-1] for pair in output.kv_cache_block_copies))
            observer.requests_changed(
                ChangedRequests(ended=ended, changed=changed, grown=grown, rewrites=self._rewrites, step=step)
            )
        self.went_on(output)

    def grow(self, output: Any, observer: Observer) -> None:
        """`report` of an output that gives blocks to requests that go on, and changes nothing else."""
        changed, grown = list[RequestChange](), dict[str, GrownBlocks]()
        self._go_on(output.scheduled_cached_reqs, {}, changed, grown, self.lists)
        if changed or grown:
            observer.requests_changed(ChangedRequests(changed=changed, grown=grown, rewrites=self._rewrites))
        self.went_on(output)

    def went_on(self, output: Any) -> None:
        """An output that changes no request; `report` calls it of all."""
        if output.total_num_scheduled_tokens:
            self._last = output

    def emitted(self, request: str) -> int | None:
        """Tokens of a running request up to the last forward, by its name in reports."""
        names = [name for name in self._prompts if request_name(name) == request]
        return self._emitted(self._last, names[0]) if names else None

    def _emitted(self, output: Any, name: str) -> int | None:
        if output is None or name not in output.num_scheduled_tokens or name not in self._prompts:
            return None
        cached = output.scheduled_cached_reqs
        if name in cached.req_ids:
            place = cached.req_ids.index(name)
            computed, emitted = cached.num_computed_tokens[place], cached.num_output_tokens[place]
        else:
            new = next(new for new in output.scheduled_new_reqs if new.req_id == name)
            computed, emitted = new.num_computed_tokens, _emitted_before(new)
        drafted = len(output.scheduled_spec_decode_tokens.get(name, ()))
        after = computed + output.num_scheduled_tokens[name] - drafted
        # One that came back computes tokens that it has emitted.
        return max(int(emitted), int(after) + 1 - self._prompts[name])

    def _begun(self, output: Any, loaded_from: Mapping[str, int]) -> Iterator[RequestChange]:
        for new in output.scheduled_new_reqs:
            name, computed = new.req_id, int(new.num_computed_tokens)
            # V2 is sent a request that comes back as if it were new.
            emitted = _emitted_before(new) if name in self._prompts else None
            self._prompts[name] = _prompt_tokens(new)
            joined = min(computed, loaded_from.get(name, computed))
            yield self._change(name, computed, new.block_ids, joined, emitted)

    def _go_on(
        self, cached: Any, loaded_from: Mapping[str, int], changed: list[RequestChange],
        grown: dict[str, GrownBlocks], lists: Mapping[str, Sequence[list[int]]] | None = None,
    ) -> None:  # fmt: skip
        # Spelled out: a step of many requests gives many of them a block.
        names, given, counts = cached.req_ids, cached.new_block_ids, cached.num_computed_tokens
        resumed, known = cached.resumed_req_ids, self._lengths
        # Drafted tokens that vLLM counts as computed until it knows how many were rejected.
        last = self._last if self._ahead else None
        undecided = last.scheduled_spec_decode_tokens if last is not None else {}
        found = [(number, GrownBlocks([], [], [], [])) for number in self._sizes]
        for place in places_with_blocks(cached):
            name, blocks, computed = names[place], given[place], counts[place]
            if lists is not None:
                for own, more in zip(lists[name], blocks, strict=False):
                    own += more
            if resumed and name in resumed:
                joined = min(computed, loaded_from.get(name, computed))
                emitted = int(cached.num_output_tokens[place])
                changed.append(self._change(name, int(computed), blocks, joined, emitted))
                continue
            if undecided:
                computed -= len(undecided.get(name, ()))
            lengths = known.get(name)
            if lengths is None or max(map(len, blocks)) > 1:
                changed.append(self._change(name, int(computed), blocks, None))
                continue
            for number, column in found:
                if added := blocks[number]:
                    if added[0] != NULL_BLOCK:
                        column.requests.append(name)
                        column.blocks.append(added[0])
                        column.numbers.append(lengths[number])
                        column.computed.append(computed)
                    lengths[number] += 1
        grown.update((str(number), column) for number, column in found if column.blocks)

    def _change(
        self, name: str, computed: int, blocks: Sequence[Sequence[int]], joined: int | None,
        emitted: int | None = None,
    ) -> RequestChange:  # fmt: skip
        """`joined`: tokens that were there when the request began; None = it goes on. `emitted`: by then."""
        if joined is not None:
            self._lengths[name] = dict.fromkeys(self._sizes, 0)
        lengths, added = self._lengths.setdefault(name, dict.fromkeys(self._sizes, 0)), {}
        for number, size in self._sizes.items():
            ids = np.array(blocks[number], dtype=np.int64)
            if ids.size:
                count = min(-(-(joined or 0) // size), ids.size)
                added[str(number)] = _without_null(AddedBlocks(ids, lengths[number], count))
                lengths[number] += ids.size
        return RequestChange(
            request=name, begins=joined is not None, prompt=self._prompts.get(name, 0), computed=computed,
            added=added, emitted=emitted,
        )  # fmt: skip


def changes_of(runner: Any, groups: Sequence[VllmGroup]) -> RequestChanges:
    """Of the requests of a model runner with these groups."""
    ahead = bool(runner.vllm_config.scheduler_config.async_scheduling)
    return RequestChanges(groups, rewrites=runner.speculative_config is not None, ahead=ahead)


class FollowsRequests(EngineAdapter):
    """An adapter whose RequestChanges answer for it."""

    requests: RequestChanges
    connector: ConnectorReports
    inputs_persist: bool
    _forwards: ForwardCount
    completes_views = True  # by `complete_view`

    def follow_output(self, output: Any, observer: Observer) -> None:
        """Follow the requests and blocks of a scheduler output, before the runner acts on it."""
        try:  # not by `guarded`: every step pays for each call
            if self.requests.due is not None:  # of a step that failed
                self.requests.settle()
            self._follow(output, observer)
        except KVCacheViolation:
            raise
        except Exception as error:  # noqa: BLE001 - a fault of the canary must not reach the engine
            observer.fault("announce", error)

    @abstractmethod
    def _follow(self, output: Any, observer: Observer) -> None:
        """The same; may fail."""

    def show_requests(self) -> None:
        """What the step under way has changed."""
        self.requests.settle()

    def _show_changes(self, output: Any, loaded_from: Mapping[str, int], observer: Observer) -> None:
        """Once the forward was launched, or something that precedes it asks to `show_requests`."""
        if output.total_num_scheduled_tokens and self.inputs_persist:
            self.requests.defer(output, loaded_from, observer)
        else:
            self.requests.report(output, loaded_from, observer)

    def copies_stored_in(self) -> StoredIn | None:
        """Connectors of this worker that store blocks, also of a MultiConnector."""
        return self.connector.stored_in

    def block_tables(self) -> Mapping[str, BlockTable]:
        """Block lists by vLLM's group number; a draft's layers share those of the target's group."""
        return self.requests.tables

    def requests_scheduled(self) -> int:
        """By the scheduler outputs that reached the worker."""
        return self._forwards.requests

    def tokens_emitted(self, request: str) -> int | None:
        """By the last scheduler output, where it was in it: with drafted tokens, the fewest there can be."""
        return self.requests.emitted(request)


def places_with_blocks(cached: Any) -> list[int]:
    """Where requests that go on, or come back, are given blocks: a tuple of lists, not None."""
    return list(compress(range(len(cached.new_block_ids)), cached.new_block_ids))


def _prompt_tokens(new: Any) -> int:
    # Newer versions have a property for it, 0.26 has not.
    ids = new.prompt_token_ids
    return len(ids if ids is not None else new.prompt_embeds)


def _emitted_before(new: Any) -> int:
    ids = new.prefill_token_ids  # None for V1, whose new requests have emitted nothing
    return 0 if ids is None else len(ids) - _prompt_tokens(new)


def _without_null(added: AddedBlocks) -> AddedBlocks:
    """Blocks that a window has left are null; the others' numbers are theirs, or higher."""
    held = added.blocks != NULL_BLOCK
    if held.all():
        return added
    nulls = int((~held).sum())
    return AddedBlocks(added.blocks[held], added.first + nulls, int(held[: added.joined].sum()))


def _originals(changed: Sequence[RequestChange], copies: Mapping[int, int]) -> list[RequestChange]:
    """Whoever got the copy of a block (copies: original by copy) has read the original."""
    found = []
    for change in changed:
        added = {}
        for number, own in change.added.items():
            read = [copies[block] for block in own.blocks.tolist() if block in copies]
            if read:
                added[number] = AddedBlocks(np.array(read, dtype=np.int64), 0, len(read))
        if added:
            found.append(replace(change, begins=False, added=added))
    return found
