"""SGLang's states of linear attention and Mamba layers: a request has one slot of their pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from canary_kernels.hashing import mix_arrays
from canary_obs.copy_records.draft_trees import SlotMap, own_slots
from canary_obs.engine_api.views import GroupStep, GroupTokens, GroupView, StepTypes
from canary_obs.engines.toolkit.chain_sums import ANCHOR
from canary_obs.engines.toolkit.state_entries import StateEntries
from canary_obs.engines.toolkit.state_sources import state_sources
from canary_obs.errors import UnsupportedEngine

STATE = "state"


def state_view(pool: Any, rank: int) -> GroupView:
    """The group of a request pool's states. Raises UnsupportedEngine for states that cannot be followed.

    `rank`: of the tensor ranks, each of which has some heads.
    """
    states = pool.mamba_pool
    held, kinds = states.mamba_cache, type(states).State
    obstacles = {
        "with copies in 8 bits": getattr(pool, "mamba_ckpt_pool", None) is not None,
        "together with states of short convolutions or n-grams": bool(
            getattr(states, "_slot_siblings", ())  # SGLang 0.5.16 has none
        ),
        "with buffers that forwards fill for the prefix cache": pool.enable_mamba_extra_buffer
        and str(states.device) == "cpu",
        "with such buffers that are allocated late": getattr(pool, "enable_mamba_extra_buffer_lazy", False),
        "that are written behind their requests (ReplaySSM)": states.replayssm_write_pos is not None,
        "with drafts": type(held) is not kinds,
    }
    if met := [what for what, there in obstacles.items() if there]:
        raise UnsupportedEngine(f"states are not followed {', '.join(met)}")
    layers = [
        (int(layer), [part[index] for part in (*held.conv, held.temporal)])
        for layer, index in pool.mamba_map.items()
    ]
    return GroupView(
        name=STATE, num_slots=int(states.size) + 1, page_size=1, sources=state_sources(layers, rank)
    )


def slot_of(request: Any) -> int:
    """The slot of a request's state, by the scheduler; -1 = it has none. Waits for the device."""
    slot = held_state(request)
    return -1 if slot is None else int(slot)


def held_state(request: Any) -> Tensor | None:
    """int64 []: the same on the device; None = it has none."""
    kept = request.kv if hasattr(request.kv, "mamba_pool_idx") else request  # SGLang 0.5.16
    slot: Tensor | None = kept.mamba_pool_idx
    return slot


def state_slots(request: Any) -> Tensor:
    """int64 [0 or 1]: the slot of a request's state."""
    slot = slot_of(request)
    return torch.tensor([slot] if slot > 0 else [], dtype=torch.int64)


class StateSteps:
    """What a forward does to states, on a CPU.

    A record is written where the scheduler says that the request's state is, and looked for where the model's
    layers look: two answers are a finding. It holds a number of the request in place of a token.
    """

    def __init__(self, rows: Tensor, types: StepTypes, own: SlotMap | None = None) -> None:
        """`rows`: of the states, as layers are given them, int32 [rows of the request table].

        `own`: the slots by these numbers; None = they are the same.
        """
        self._rows, self._own = rows, own
        self._table = rows[:, None] if own is None else torch.zeros_like(rows)[:, None]
        self._entries = StateEntries(rows.shape[0], types, torch.device("cpu"))
        self._types = types
        self._last: tuple[Sequence[str], GroupTokens] | None = None

    def step(self, requests: Sequence[Any], names: Sequence[str]) -> GroupStep:
        """`names`: of the requests; the same list for the same requests."""
        slots = torch.tensor([slot_of(request) for request in requests], dtype=self._types.out_slots)
        if self._own is not None:
            self._table[:, 0] = self._own[self._rows]
            slots = own_slots(self._own, slots)
        if self._last is None or self._last[0] is not names:
            self._last = names, self._tokens(names)
        return GroupStep(slot_table=self._table, out_slots=slots, tokens=self._last[1])

    def _tokens(self, names: Sequence[str]) -> GroupTokens:
        count = len(names)
        numbers, known = numbers_of(names)
        return replace(
            self._entries.of(count),
            input_ids=torch.from_numpy(numbers).to(self._types.input_ids),
            known_lens=torch.ones(count, dtype=torch.int64),
            known_digests=torch.from_numpy(known),
        )


def numbers_of(names: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """int64 [n] each: what requests' states have in place of a token, and the chain over that."""
    numbers = np.array([crc32(name.encode()) >> 1 for name in names], dtype=np.int64)
    known = mix_arrays(numbers.astype(np.int32), np.zeros(len(names), dtype=np.int64)) + ANCHOR
    return numbers, known.view(np.int64)
