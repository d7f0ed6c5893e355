"""Which token each slot of a draft model has: the one after it, or its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from canary_obs.engines.sglang.draft_views import DraftViews
from tests.engines.sglang.test_request_chains import Request, chain

TABLE = torch.arange(40, dtype=torch.int32).view(4, 10)
# The newest token of each has no KV yet.
REQUESTS = [Request("a", [5, 6, 7], [8]), Request("b", [1, 2], [3, 4, 9])]


def tokens_of(*, pairs: bool) -> Any:
    scheduler = SimpleNamespace(spec_algorithm=SimpleNamespace(is_eagle=lambda: pairs))
    batch = SimpleNamespace(
        extend_seq_lens=torch.tensor([2, 2], dtype=torch.int32), seq_lens=torch.tensor([5, 6]),
        req_pool_indices=torch.tensor([2, 3]), input_ids=torch.tensor([20, 21, 30, 31]),
        positions=torch.tensor([3, 4, 4, 5]), out_cache_loc=torch.tensor([23, 24, 34, 35]),
    )  # fmt: skip
    view = DraftViews(scheduler, TABLE).build(batch, REQUESTS)
    assert list(view.groups) == ["draft"]
    assert view.request_ids == ["a", "b"]
    tokens = view.groups["draft"].tokens
    assert tokens is not None
    assert tokens.prefix_lens.tolist() == [3, 4]
    assert tokens.token_starts.tolist() == [0, 2, 4]
    return tokens


def test_with_pairs_a_slot_has_the_token_after_it() -> None:
    tokens = tokens_of(pairs=True)
    assert tokens.input_ids.tolist() == [20, 21, 30, 31]
    assert tokens.digests.tolist() == [chain([6, 7, 8]), chain([2, 3, 4, 9])]


def test_without_pairs_a_slot_has_its_own_token() -> None:
    tokens = tokens_of(pairs=False)
    assert tokens.input_ids.tolist() == [8, 20, 9, 30]
    assert tokens.digests.tolist() == [chain([5, 6, 7]), chain([1, 2, 3, 4])]
