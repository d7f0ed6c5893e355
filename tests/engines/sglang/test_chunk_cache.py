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
