"""Models whose sparse attention keeps keys of its own (DeepSeek-V3.2): the latent rows, and the keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from canary_obs.vocabulary import Reason, State
from tests.engines.vllm.index_key_writes import SIZE, register
from tests.engines.vllm.real.index_keys import add_index_keys
from tests.engines.vllm.real.rig import LATENT, Rig, prompts

ENGINE: dict[str, Any] = LATENT | {"block_size": 16, "num_gpu_blocks_override": 200}


@pytest.fixture
def operation() -> Iterator[None]:
    library = register()
    yield
    library._destroy()


def index_cache(rig: Rig, layer: int) -> torch.Tensor:
    layers = rig.runner.compilation_config.static_forward_context
    found: torch.Tensor = layers[f"model.layers.{layer}.self_attn.indexer.k_cache"].kv_cache
    return found


def test_keys_that_cannot_be_checked_cost_only_themselves(
    make_rig: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Until 0.2 one layer of the group that nobody knows left the whole engine unprotected."""
    add_index_keys(monkeypatch.setattr, filled=False)
    rig = make_rig("deepseek", **ENGINE)
    rig.generate(prompts(4), 8)
    assert rig.settle() == []
    assert [group.view.name for group in rig.adapter.vllm_groups] == ["full"]
    assert {source.layer for source in rig.adapter.vllm_groups[0].view.sources} == {0, 1}
    state, reasons = rig.canary.verdict()
    assert state is State.DEGRADED
    share = (SIZE + 4) / (SIZE + 4 + 576 * 4)
    assert rig.canary.state.coverage == pytest.approx(1 - share)
    assert any(
        f"{share:.1%}" in text and "index keys" in text and "2 of its 4 layers" in text for text in reasons
    )
    assert not any("the adapter shows" in text for text in reasons)
    assert "index keys" in caplog.text


@pytest.mark.usefixtures("operation")
def test_a_flip_in_an_index_key_or_its_scale_is_found(make_rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    add_index_keys(monkeypatch.setattr, filled=True)
    rig = make_rig("deepseek", **ENGINE)
    names = [group.view.name for group in rig.adapter.vllm_groups]
    assert names == ["full", "indexer"]
    rig.start({"a": prompts(1)[0], "b": prompts(2, seed=3)[1]}, 40)
    rig.step(12)
    assert rig.settle() == []
    assert rig.canary.verdict() == (State.OK, ())
    block = rig.blocks_of("a")[2]
    flat = index_cache(rig, 1).view(-1, 16 * (SIZE + 4))
    for place in (5 * SIZE + 7, 16 * SIZE + 5 * 4 + 2):  # a key, a scale
        with rig.at_rest():
            flat[block, place] ^= 1 << 3
            rig.settle()
            flat[block, place] ^= 1 << 3
        assert {(found.group, found.slot, found.reason) for found in rig.found} == {
            ("indexer", block * 16 + 5, Reason.KV_DATA)
        }
        rig.found.clear()
