"""Splits and joins records for transfers between engines that shard heads differently.

The fingerprints of shards sum to the fingerprint of the whole slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b

import torch
from torch import Tensor

from canary_kernels import layout
from canary_kernels.arrival import fold_records
from canary_kernels.buffers import KVSource
from canary_kernels.fingerprint import FingerprintPlan, hash_slots, plan_fingerprint
from canary_kernels.hashing import word_keys
from canary_obs.errors import EngineContractError
from canary_obs.runtime.device.state import DeviceState, Group
from canary_obs.runtime.device.uploads import uploaded
from canary_obs.runtime.faults import Faults
from canary_obs.vocabulary import ObserverPart

_VERSION = 2  # of records: raise it with every change of what their bytes mean
_LINK_WORDS = slice(layout.IDENTITY, layout.FINGERPRINT_K)
_STATE_MASK = layout.STATE_MASK << 32


class FoldKeys:
    """By which the fingerprints of a block's slots are folded to one number per part.

    Every slot has a key of its own. Folds of shares (heads, layers) sum to the fold of the whole.
    """

    def __init__(self) -> None:
        self._keys: dict[tuple[int, torch.device], Tensor] = {}  # by block size

    def of(self, size: int, device: torch.device) -> Tensor:
        """int64 [size]: of the slots of a block, on this device."""
        keys = self._keys.get((size, device))
        if keys is None:  # the first time, behind a forward
            keys = self._keys[size, device] = uploaded(word_keys(0, size), device)
        return keys


class RecordShares:
    """Reads records, split for receivers that each hold some of the heads. Plans are made at first use."""

    def __init__(self, state: DeviceState, faults: Faults) -> None:
        self._state, self._faults = state, faults
        self._plans: dict[tuple[str, range], FingerprintPlan] = {}
        self._keys = FoldKeys()

    def format_of(self, name: str) -> int | None:
        """Number of the fingerprints' format: equal numbers are comparable. None = no such group."""
        group = self._state.by_name.get(name)
        if group is None:
            return None
        sizes = sorted({(source.part, source.plane, source.head_bytes) for source in group.view.sources})
        described = _VERSION, group.plan.coverage, sizes
        return int.from_bytes(blake2b(repr(described).encode(), digest_size=7).digest(), "little")

    def read(self, name: str, slots: Tensor, shares: Sequence[range]) -> Tensor | None:
        """Records of slots (int64 [n]): int64 [n, RECORD_WORDS], or [len(shares), n, RECORD_WORDS].

        `shares` are ranges of global heads, together all that are held here. The last share gets the rest of
        the recorded fingerprint, so that damaged bytes fail at one of the receivers. None = reading failed,
        which is counted as a fault: the bytes then travel without records.
        """
        found: list[Tensor] = []
        self._faults.guard(ObserverPart.ANNOUNCE, lambda: found.append(self._read(name, slots, shares)))
        return found[0] if found else None

    def folds(
        self, name: str, slots: Tensor, *, baselines: bool = False, shares: Sequence[range] = ()
    ) -> Tensor | None:
        """int64 [blocks, 3], or [len(shares), blocks, 3], of slots (int64 [blocks, size]; -1 = left out).

        See `Observer.block_folds`. None = reading failed, which is counted as a fault.
        """
        found: list[Tensor] = []
        self._faults.guard(
            ObserverPart.ANNOUNCE, lambda: found.append(self._folds(name, slots, baselines, shares))
        )
        return found[0] if found else None

    def _folds(self, name: str, slots: Tensor, baselines: bool, shares: Sequence[range]) -> Tensor:
        (group,) = self._state.named((name,))
        slots = uploaded(slots, group.memory.device)  # behind a forward, where a store is submitted
        known = group.plan.coverage is not layout.RealData.NONE
        if known:
            keys = self._keys.of(slots.shape[1], slots.device)
            whole = fold_records(group.backend, group.buffers, slots, keys, baselines=baselines)
        else:
            whole = torch.zeros((slots.shape[0], 3), dtype=torch.int64, device=slots.device)
        if not shares:
            return whole
        folds = whole.repeat(len(shares), 1, 1)
        for number, share in enumerate(shares[:-1] if known else ()):
            hashes = hash_slots(group.backend, self._plan(group, share), slots.flatten())
            part = (hashes.view(*slots.shape, 2) * keys[:, None]).sum(1)
            folds[number, :, 1:] = part
            folds[-1, :, 1:] -= part
        return folds

    def _read(self, name: str, slots: Tensor, shares: Sequence[range]) -> Tensor:
        (group,) = self._state.named((name,))
        whole = group.records_of(slots)
        if not shares:
            return whole
        records = whole.repeat(len(shares), 1, 1)
        for number, share in enumerate(shares[:-1]):
            part = hash_slots(self._state.backend, self._plan(group, share), slots)
            records[number, :, layout.FINGERPRINT_K :] = part
            records[-1, :, layout.FINGERPRINT_K :] -= part
        return records

    def _plan(self, group: Group, share: range) -> FingerprintPlan:
        key = group.name, share
        if key not in self._plans:
            sources = [_source_of_share(source, share) for source in group.view.sources]
            self._plans[key] = plan_fingerprint(sources, group.plan.coverage, group.plan.device)
        return self._plans[key]


def join_records(records: Tensor) -> Tensor:
    """int64 [n, RECORD_WORDS] of records [n, RECORD_WORDS], or [shares, n, RECORD_WORDS] of all senders.

    EMPTY where senders differ in token, position, chain or state, or where the state is PENDING.
    """
    shares = records if records.dim() == 3 else records[None]
    whole = shares[0].clone()
    whole[:, layout.FINGERPRINT_K :] = shares[:, :, layout.FINGERPRINT_K :].sum(0)
    agreed = (shares[:, :, _LINK_WORDS] == shares[:1, :, _LINK_WORDS]).flatten(2).all(2).all(0)
    pending = (whole[:, layout.IDENTITY] & _STATE_MASK) == int(layout.RecordState.PENDING) << 32
    return torch.where((agreed & ~pending)[:, None], whole, 0)


def _source_of_share(source: KVSource, share: range) -> KVSource:
    first = share.start - source.head_start
    if first < 0 or share.stop > source.head_start + source.num_heads:
        held = range(source.head_start, source.head_start + source.num_heads)
        raise EngineContractError(
            f"share {share} of layer {source.layer} with {held}; the rule is heads that are held here; "
            "ask for shares of this rank's own heads"
        )
    skipped = first * source.head_stride // source.tensor.element_size()
    flat = source.tensor.as_strided((1,), (1,), source.tensor.storage_offset() + skipped)
    return replace(source, tensor=flat, head_start=share.start, num_heads=len(share))
