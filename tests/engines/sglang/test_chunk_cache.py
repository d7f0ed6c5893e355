"""Schedulers without a prefix cache have nothing that a sweep could read."""

from __future__ import annotations

import torch

from canary_obs.engines.sglang.chunk_cache import EmptyTree
from canary_obs.engines.sglang.freed_slots import FreedSlots
from canary_obs.engines.toolkit.forward_stream import ForwardStream
from tests.engines.sglang.test_freed_slots import Tokens


def test_a_sweep_of_no_cache_ends_at_once() -> None:
    own, freed = torch.device("cpu"), FreedSlots(Tokens(20), 21)
    tree = EmptyTree(object(), {"full": freed}, device=own, scheduler=ForwardStream(own))
    walk = tree.walk("full")
    assert (walk.total, walk.ready, walk.take(8).slots.tolist()) == (0, True, [])
    for unlocked_only in (False, True):
        assert tree.cached("full", unlocked_only=unlocked_only).slots.tolist() == []
    assert (tree.count("full").slots, tree.count("full").removed) == (0, freed.total)


def test_windows_are_asked_for_no_slots() -> None:
    """They lie on the engine's device."""
    own = torch.device("cpu")
    elsewhere = torch.zeros(4, dtype=torch.int64, device="meta")
    for windows, expected in (({}, None), ({"swa": elsewhere}, [])):
        freed = {name: FreedSlots(Tokens(20), 21) for name in ("full", *windows)}
        tree = EmptyTree(object(), freed, windows, device=own, scheduler=ForwardStream(own))
        resident = tree.swa_resident("full", torch.empty(0, dtype=torch.int64))
        assert (resident if resident is None else resident.tolist()) == expected
