"""Layer writes on the CPU, on the tensors' own memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from canary_kernels.fingerprint.reference import hash_slots, held_slots
from canary_kernels.layout import (
    COUNT_LAYER_CHECKED,
    COUNT_LAYER_LEFT_OUT,
    IDENTITY,
    MAX_POSITION,
    NO_REQUEST,
    STATE_BITS,
    STATE_MASK,
    Part,
    Phase,
    Reason,
    RecordState,
)
from canary_kernels.violations import report_where

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from canary_kernels.buffers import GroupBuffers
    from canary_kernels.fingerprint.plan import FingerprintPlan

    Longs = NDArray[np.int64]
    Flags = NDArray[np.bool_]

_LOW_WORD = (1 << 32) - 1


def note_layer(buffers: GroupBuffers, layer: FingerprintPlan, witness: Tensor, slots: Tensor) -> None:
    """Note slots, identities and hashes."""
    listed, rows = slots.numpy().astype(np.int64), witness.numpy()
    known = _known(buffers, layer, listed)
    places = np.where(known, listed, -1)
    noted = rows[: listed.shape[0]]
    noted[:, 0] = places
    noted[:, 1] = np.where(known, buffers.records.numpy()[np.where(known, listed, 0), IDENTITY], 0)
    noted[:, 2:] = hash_slots(layer, torch.from_numpy(places)).numpy()


def check_layer(buffers: GroupBuffers, layer: FingerprintPlan, witness: Tensor, slots: Tensor) -> None:
    """Compare the hashes with those noted."""
    listed = slots.numpy().astype(np.int64)
    noted, counters = witness.numpy()[: listed.shape[0]], buffers.counters.numpy()
    known = _known(buffers, layer, listed) & (noted[:, 0] == listed)
    places = np.where(known, listed, 0)
    identity, old = buffers.records.numpy()[places, IDENTITY], noted[:, 1]
    known &= (identity >> 32 & STATE_MASK) == RecordState.COMPLETE
    counters[COUNT_LAYER_CHECKED] += known.sum()
    counters[COUNT_LAYER_LEFT_OUT] += listed.shape[0] - known.sum()
    replaced = ((old >> 32 & STATE_MASK) == RecordState.COMPLETE) & (((old ^ identity) & _LOW_WORD) != 0)
    hashes = hash_slots(layer, torch.from_numpy(np.where(known, listed, -1))).numpy()
    positions = identity >> (32 + STATE_BITS) & MAX_POSITION
    (bundle,) = layer.bundles
    for part, held in ((Part.K, bundle.num_k), (Part.V, len(bundle.sources) - bundle.num_k)):
        before, after = noted[:, 1 + part], hashes[:, part - 1]
        # A token alone may rightly leave zeros: it attends to nothing else.
        lost = known & (before == after) & (replaced | ((positions > 0) & (before == 0))) & (held > 0)
        check = Phase.TAIL, Reason.LOST_WRITE, part
        report_where(buffers, check, lost, (listed, positions, NO_REQUEST, before, after))
    noted[:, 0] = -1


def _known(buffers: GroupBuffers, layer: FingerprintPlan, listed: Longs) -> Flags:
    """The slots that have records, and bytes on this rank."""
    known: Flags = (listed >= 0) & (listed < buffers.num_slots) & held_slots(layer.sharding, listed)
    return known
