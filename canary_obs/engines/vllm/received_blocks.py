"""Records of blocks that a worker sends, and those that its receives are compared with; with NIXL."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from canary_obs.copy_records.sent_records import Fold, GroupShare, joined
from canary_obs.engine_api.observer import Observer
from canary_obs.engines.toolkit.guarded import guarded
from canary_obs.engines.toolkit.method_patches import MethodPatches
from canary_obs.engines.vllm.groups import VllmGroup
from canary_obs.engines.vllm.sent_blocks import (
    EXPECTED_ATTRIBUTE,
    SENT_ATTRIBUTE,
    Expected,
    Found,
    RankShare,
    Sent,
    WorkerRecords,
)
from canary_obs.engines.vllm.sent_copies import Copies
from canary_obs.engines.vllm.transfer_readers import TransferReaders

_Pending = Sequence[tuple[Sent, VllmGroup, "BlockFoldsOnHost | None"]]


class TransferRecords:
    """Of one worker: takes the folds of what is sent at the end of a prompt's last forward."""

    def __init__(self, groups: Sequence[VllmGroup], copies: Copies, observer: Observer) -> None:
        self._groups = groups
        self._copies, self._observer = copies, observer
        self._sent: Sequence[Sent] = ()
        self._open: WorkerRecords | None = None  # of the forward under way
        self._ended: Callable[[], list[Found]] | None = None  # of a forward whose connector was not asked yet
        self._expected: dict[str, Expected] = {}
        self.by_transfer = False  # what has a transfer's id is followed elsewhere
        self.readers = TransferReaders(self._groups, observer)

    def wrap(self, patches: MethodPatches, connector: Any) -> None:
        """Records go along with what this connector reports to its scheduler."""
        patches.wrap(connector, "build_connector_worker_meta", self._around_meta)
        self.readers.wrap(patches, connector)

    def follow(self, output: Any) -> None:
        """What a scheduler output says is sent after its forward, and received from now on."""
        self._sent, self._open, self._ended = getattr(output, SENT_ATTRIBUTE, ()), None, None
        if self.by_transfer:
            self._sent = [each for each in self._sent if not each.transfer]
        for request in output.finished_req_ids:
            self._expected.pop(request, None)
        for expected in getattr(output, EXPECTED_ATTRIBUTE, ()):
            self._expected[expected.request] = expected

    def arrived(self, finished: Iterable[str], failed: Collection[str]) -> None:
        """The receives of these requests are complete; blocks of those that did not fail can be compared."""
        for request in finished:
            expected = self._expected.pop(request, None)
            if expected is not None and request not in failed:
                self.expect(expected)

    def expect(self, expected: Expected) -> None:
        """What a receive is compared with that was just reported complete."""
        for group in self._groups:
            if group.number < len(expected.blocks):
                self._expect(group, expected)

    def _expect(self, group: VllmGroup, expected: Expected) -> None:
        name, blocks, records = group.view.name, expected.blocks[group.number], expected.records
        own, folds = self.share(group), list[Fold | None]()
        if own is not None and records is not None:
            folds = joined([rank[name] for rank in records.shares if name in rank], own)
        first = len(folds) - len(blocks)  # of a prefix that is cached here nothing is received
        own_folds = folds[first:] if first >= 0 else [None] * len(blocks)
        filled = [group.block_slots] * len(blocks)
        if records is not None and filled:
            filled[-1] = (records.tokens - 1) % group.block_slots + 1
        found = [() if fold is None else (fold,) for fold in own_folds]
        self._copies.put(name, blocks, filled, found, expected.peer)

    def share(self, group: VllmGroup, heads: range | None = None) -> GroupShare | None:
        """What this rank holds of a group, or these of its heads, without folds.

        None = its records cannot be compared.
        """
        number = self._observer.record_format(group.view.name)
        if number is None:
            return None
        sources = [
            (int(each.layer), int(each.part), int(each.head_start), int(each.num_heads))
            if heads is None
            else (int(each.layer), int(each.part), heads.start, len(heads))
            for each in group.view.sources
        ]
        return GroupShare(number, group.block_slots, sorted(sources), [])

    def shares(
        self, group: VllmGroup, folds: BlockFoldsOnHost
    ) -> Iterator[tuple[GroupShare, dict[int, Fold | None]]]:
        """Each share of the heads, without folds, and those by block. Waits for them."""
        for heads, by_block in folds.by_share():
            share = self.share(group, heads)
            if share is not None:
                yield share, by_block

    def _around_meta(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def build_connector_worker_meta(*args: Any, **kwargs: Any) -> Any:
            inner, ended = original(*args, **kwargs), self._ended
            if ended is None and not self._sent:
                return inner
            records, self._ended = WorkerRecords(inner, []), None
            records.pending = ended
            self._open = records if ended is None else None
            return records

        return build_connector_worker_meta

    def end_forward(self) -> None:
        """The records of what the forward has written are complete: take the folds of what is sent.

        The V1 model runner has asked its connector by then, the V2 model runner asks it after sampling.
        """
        (sent, self._sent), (records, self._open) = (self._sent, ()), (self._open, None)
        if not sent:
            return
        folds = guarded(self._observer, "announce", self._folds_of, sent)
        if folds is None:
            return  # what is sent is unverified at the receiver
        if records is not None:
            records.pending = partial(self._found_or_nothing, folds)
        else:
            self._ended = partial(self._found_or_nothing, folds)

    def _folds_of(self, sent: Sequence[Sent]) -> _Pending:
        return [(each, group, self.folds(group, each)) for each in sent for group in self._groups]

    def _found_or_nothing(self, pending: _Pending) -> list[Found]:
        """Awaited where the engine's own results are."""
        return guarded(self._observer, "announce", self._found, pending) or []

    def _found(self, pending: _Pending) -> list[Found]:
        found = defaultdict[int, Found](dict)  # by place of the share
        for sent, group, folds in pending:
            for place, (share, by_block) in enumerate(() if folds is None else self.shares(group, folds)):
                of_request = found[place].setdefault(sent.request, {})
                of_request[group.view.name] = RankShare(share, group.number, by_block)
        return list(found.values())

    def folds(self, group: VllmGroup, sent: Sent) -> BlockFoldsOnHost | None:
        """Of the records of a request's blocks, as they are now."""
        size, blocks = group.block_slots, sent.blocks[group.number]
        stop = len(blocks) if group.states else sent.tokens
        held = [(place, block) for place, block in enumerate(blocks) if block and place * size < stop]
        if not held:
            return None
        places, ids = torch.tensor(held, dtype=torch.int64).unbind(1)
        offsets = torch.arange(size)
        slots = ids[:, None] * size + offsets
        slots[places[:, None] * size + offsets >= stop] = -1
        shares = self.readers.shares.get(group.view.name, ())
        folds = self._observer.block_folds(group.view.name, slots, baselines=group.states, shares=shares)
        return None if folds is None else BlockFoldsOnHost([block for _, block in held], folds, shares)


class BlockFoldsOnHost:
    """Folds of blocks, on their way to the host: int64 [blocks, 3], or of each share [shares, blocks, 3]."""

    def __init__(self, blocks: Sequence[int], folds: Tensor, shares: Sequence[range] = ()) -> None:
        self._blocks, self._folds, self._shares = blocks, folds, shares
        self._event: Any = None
        if folds.is_cuda:
            self._folds = torch.empty(folds.shape, dtype=folds.dtype, pin_memory=True)
            self._folds.copy_(folds, non_blocking=True)
            self._event = torch.Event(folds.device)
            self._event.record()

    def by_share(self) -> Iterator[tuple[range | None, dict[int, Fold | None]]]:
        """Heads (None = all that are held here) with their folds by block. Waits for them."""
        if self._event is not None:
            self._event.synchronize()
        shares = self._shares or (None,)
        for heads, folds in zip(shares, self._folds.view(len(shares), -1, 3).tolist(), strict=True):
            rows = zip(self._blocks, folds, strict=True)
            yield heads, {block: (k, v) if whole else None for block, (whole, k, v) in rows}
