"""What the scheduler records of loads, without a vLLM."""

from __future__ import annotations

import logging
import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from canary_obs.engines.toolkit.later import Later
from canary_obs.engines.vllm.pending_events import PENDING, _record_loads
from canary_obs.engines.vllm.pool_events import Loaded, LoadTokens


class _Read(list[int]):
    """A request's tokens; counts how often they were read."""

    reads = 0

    def __getitem__(self, which: Any) -> Any:
        self.reads += 1
        return super().__getitem__(which)


def _recorded(tokens: list[int]) -> tuple[LoadTokens, Loaded]:
    pool = SimpleNamespace(**{PENDING: []})
    manager = SimpleNamespace(block_pool=pool, get_block_ids=lambda _: ([3, 4],))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("canary_obs.engines.vllm.pending_events.block_tokens", lambda *_: 4)
        request = SimpleNamespace(request_id="a", prompt_embeds=None, all_token_ids=tokens)
        _record_loads(SimpleNamespace(kv_cache_manager=manager), request, 0, 8)
    found = getattr(pool, PENDING)
    return found[0], found[1]


def test_tokens_of_a_load_are_read_when_they_are_asked_for() -> None:
    """The load waits for what precedes it. A request's tokens become more meanwhile; those it had stay."""
    tokens = _Read(range(9))
    said, loaded = _recorded(tokens)
    assert (tokens.reads, loaded) == (0, Loaded(0, (3, 4), 0, 0, 8, "a"))
    tokens.append(9)
    assert pickle.loads(pickle.dumps(said)).tokens == np.arange(8, dtype=np.int32).tobytes()
    assert isinstance(said.tokens, Later)
    assert said.tokens.get() == np.arange(8, dtype=np.int32).tobytes()


def test_tokens_that_cannot_be_read_are_unknown_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    said, _ = _recorded(["a", "token"])  # type: ignore[list-item]
    assert isinstance(said.tokens, Later)
    with caplog.at_level(logging.ERROR):
        assert said.tokens.get() is None
    assert "first_tokens failed" in caplog.text
