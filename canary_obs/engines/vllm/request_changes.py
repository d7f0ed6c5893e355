"""Shows which requests a scheduler output begins, ends or gives blocks to, and nothing else."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import compress
from typing import Any, NamedTuple

import numpy as np

from canary_obs.engine_api.observer import Observer
from canary_obs.engine_api.requests import (
    AddedBlocks,
    BlockTable,
    ChangedRequests,
    GrownBlocks,
    RequestChange,
)
from canary_obs.engines.vllm.groups import VllmGroup
from canary_obs.engines.vllm.window_tables import NULL_BLOCK
from canary_obs.slot_facts import request_name

_TOGETHER = 8  # outputs whose changes are shown together


class _Begun(NamedTuple):
    """A request as an output begins or resumes it. The engine goes on with the lists of the output."""

    blocks: Sequence[int]  # how many of each group
    prompt: int  # tokens; 0 = it is resumed, and known
    emitted: int  # tokens


_NOBODY: dict[str, _Begun] = {}
# An output with tokens, and by name who begins with it; a plain tuple: it is made in every step.
_Last = tuple[Any, Mapping[str, _Begun]]


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
        self._last: _Last | None = None  # before this output
        self._waiting = deque[Callable[[], None]]()  # show the changes of an output each
        self.due = False  # it is time to `settle`
        # Of an adapter that has no other: block lists by request, which `grow` adds to.
        self.lists: Mapping[str, Sequence[list[int]]] | None = None

    def defer(self, output: Any, loaded_from: Mapping[str, int], observer: Observer) -> None:
        """`report` an output when `settle` is called, which is `due` once the forward was launched, or later.

        Nothing of it is needed for the forward, which waits for what precedes its launch. The changes of
        several outputs are shown together, in a fraction of the time, unless somebody asks for them.
        """
        begun, step = _begun_by(output), observer.step
        self._waiting.append(partial(self._report, output, loaded_from, observer, step, self._last, begun))
        self.due = len(self._waiting) >= _TOGETHER or observer.follows_readers
        self.went_on(output, begun)

    def settle(self) -> None:
        """Show all that was deferred."""
        waiting, self.due = self._waiting, False
        while waiting:
            waiting.popleft()()

    def report(self, output: Any, loaded_from: Mapping[str, int], observer: Observer) -> None:
        """Show the changes of an output, before the forward that it schedules.

        `loaded_from`: by request, the first token that a connector loads or has loaded.
        """
        self.settle()
        begun = _begun_by(output)
        self._report(output, loaded_from, observer, None, self._last, begun)
        self.went_on(output, begun)

    def _report(
        self, output: Any, loaded_from: Mapping[str, int], observer: Observer, step: int | None,
        last: _Last | None, begun: Mapping[str, _Begun],
    ) -> None:  # fmt: skip
        """`step`, `last`: the forward before, and its output. `begun`: as this one was scheduled."""
        cached = output.scheduled_cached_reqs
        gone = output.finished_req_ids | (output.preempted_req_ids or set())
        if gone or output.scheduled_new_reqs or cached.new_block_ids.count(None) != len(cached.new_block_ids):
            ended = {name: self._emitted(last, name) for name in gone}
            for name in output.finished_req_ids:
                self._prompts.pop(name, None)
                self._lengths.pop(name, None)
            changed, grown = list(self._begun(output, loaded_from, begun)), dict[str, GrownBlocks]()
            self._go_on(cached, loaded_from, changed, grown, last, begun)
            if output.kv_cache_block_copies:
                changed += _originals(changed, dict(pair[::-1] for pair in output.kv_cache_block_copies))
            observer.requests_changed(
                ChangedRequests(ended=ended, changed=changed, grown=grown, rewrites=self._rewrites, step=step)
            )

    def grow(self, output: Any) -> None:
        """An output gives blocks to requests that go on, and nothing else; that is still to be shown."""
        if (lists := self.lists) is not None:
            cached = output.scheduled_cached_reqs
            for place in places_with_blocks(cached):
                known = lists.get(cached.req_ids[place], ())  # (): it began in an output that failed
                for own, more in zip(known, cached.new_block_ids[place], strict=False):
                    own += more

    def went_on(self, output: Any, begun: Mapping[str, _Begun] = _NOBODY) -> None:
        """An output that changes no request; those that change some are noted like it."""
        if output.total_num_scheduled_tokens:
            self._last = output, begun

    def emitted(self, request: str) -> int | None:
        """Tokens of a running request up to the last forward, by its name in reports."""
        names = [name for name in self._prompts if request_name(name) == request]
        return self._emitted(self._last, names[0]) if names else None

    def _emitted(self, last: _Last | None, name: str) -> int | None:
        output, begun = last if last is not None else (None, _NOBODY)
        if output is None or name not in output.num_scheduled_tokens or name not in self._prompts:
            return None
        cached = output.scheduled_cached_reqs
        if name in cached.req_ids:
            place = cached.req_ids.index(name)
            computed, emitted = cached.num_computed_tokens[place], cached.num_output_tokens[place]
        else:
            new = next(new for new in output.scheduled_new_reqs if new.req_id == name)
            computed, emitted = new.num_computed_tokens, begun[name].emitted
        drafted = len(output.scheduled_spec_decode_tokens.get(name, ()))
        after = computed + output.num_scheduled_tokens[name] - drafted
        # One that came back computes tokens that it has emitted.
        return max(int(emitted), int(after) + 1 - self._prompts[name])

    def _begun(
        self, output: Any, loaded_from: Mapping[str, int], begun: Mapping[str, _Begun]
    ) -> Iterator[RequestChange]:
        for new in output.scheduled_new_reqs:
            name, computed = new.req_id, int(new.num_computed_tokens)
            then = begun[name]
            # V2 is sent a request that comes back as if it were new.
            emitted = then.emitted if name in self._prompts else None
            self._prompts[name] = then.prompt
            joined = min(computed, loaded_from.get(name, computed))
            yield self._change(name, computed, _of_then(new.block_ids, then), joined, emitted)

    def _go_on(
        self, cached: Any, loaded_from: Mapping[str, int], changed: list[RequestChange],
        grown: dict[str, GrownBlocks], last: _Last | None, begun: Mapping[str, _Begun],
    ) -> None:  # fmt: skip
        # Spelled out: a step of many requests gives many of them a block.
        names, given, counts = cached.req_ids, cached.new_block_ids, cached.num_computed_tokens
        resumed, known = cached.resumed_req_ids, self._lengths
        # Drafted tokens that vLLM counts as computed until it knows how many were rejected.
        undecided = last[0].scheduled_spec_decode_tokens if self._ahead and last is not None else {}
        found = [(number, GrownBlocks([], [], [], [])) for number in self._sizes]
        for place in places_with_blocks(cached):
            name, blocks, computed = names[place], given[place], counts[place]
            if resumed and name in resumed:
                joined = min(computed, loaded_from.get(name, computed))
                emitted, blocks = begun[name].emitted, _of_then(blocks, begun[name])
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


def _begun_by(output: Any) -> dict[str, _Begun]:
    new, cached = output.scheduled_new_reqs, output.scheduled_cached_reqs
    begun = {each.req_id: _new(each) for each in new} if new else _NOBODY
    if not (resumed := cached.resumed_req_ids):
        return begun
    columns = cached.req_ids, cached.new_block_ids, cached.num_output_tokens
    return begun | {
        name: _Begun(list(map(len, blocks)), 0, int(emitted))
        for name, blocks, emitted in zip(*columns, strict=True)
        if name in resumed and blocks is not None
    }


def _new(new: Any) -> _Begun:
    # Newer versions have a property for the prompt's length, 0.26 has not.
    ids, prefill = new.prompt_token_ids, new.prefill_token_ids
    prompt = len(ids if ids is not None else new.prompt_embeds)
    # None for V1, whose new requests have emitted nothing.
    return _Begun(list(map(len, new.block_ids)), prompt, 0 if prefill is None else len(prefill) - prompt)


def _of_then(blocks: Sequence[Sequence[int]], then: _Begun) -> list[Sequence[int]]:
    return [ids[:count] for ids, count in zip(blocks, then.blocks, strict=True)]


def places_with_blocks(cached: Any) -> list[int]:
    """Where requests that go on, or come back, are given blocks: a tuple of lists, not None."""
    return list(compress(range(len(cached.new_block_ids)), cached.new_block_ids))


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
