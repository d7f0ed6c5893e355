"""Checkpoints: a round trip, Hugging Face's file forms, and refusals that name path, rule and remedy."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from canary_obs.errors import ConfigurationError
from canary_obs.reference_engine.engine import Engine
from canary_obs.reference_engine.model.checkpoint import load_checkpoint, save_checkpoint
from canary_obs.reference_engine.model.llama import random_weights
from canary_obs.reference_engine.scheduling.request import Sampling
from canary_obs.reference_engine.settings import TINY_SHAPE, tiny
from canary_obs.reference_engine.tokenizer import decode, encode
from tests.reference_engine.plain_llama import plain_logits
from tests.reference_engine.workloads import drain


def edit(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_checkpoint(tmp_path / "model", TINY_SHAPE, random_weights(TINY_SHAPE, seed=7))
    return tmp_path / "model"


@pytest.mark.parametrize("tied", [False, True])
def test_round_trip(tmp_path: Path, tied: bool) -> None:
    shape = replace(TINY_SHAPE, tied_embeddings=tied)
    weights = random_weights(shape, seed=7)
    save_checkpoint(tmp_path, shape, weights)
    loaded_shape, loaded = load_checkpoint(tmp_path, torch.float32)
    assert loaded_shape == shape
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name], weight) for name, weight in weights.items())


def test_engine_serves_a_checkpoint(saved: Path) -> None:
    question = encode("What is a hack?", bos=True)
    outputs = []
    for config in (tiny(seed=7), tiny(checkpoint=saved), tiny()):
        engine = Engine(config)
        engine.add_request(question, Sampling(max_tokens=12, stop_at_eos=False))
        outputs.append(drain(engine)[0].output.tolist())
    assert outputs[0] == outputs[1] != outputs[2]


def test_tied_embeddings_serve_as_head(tmp_path: Path) -> None:
    shape = replace(TINY_SHAPE, tied_embeddings=True)
    weights = random_weights(shape, seed=2)
    save_checkpoint(tmp_path, shape, weights)
    engine = Engine(tiny(checkpoint=tmp_path))
    tokens = encode("tied")
    engine.add_request(tokens, Sampling(max_tokens=1))
    batch = engine.runner.prepare(engine.scheduler.schedule())
    expected = plain_logits(shape, weights, tokens.tolist())[-1:]
    torch.testing.assert_close(engine.runner.forward(batch).double(), expected, atol=1e-4, rtol=1e-4)


def test_sharded_half_precision(saved: Path) -> None:
    weights = {name: value.bfloat16() for name, value in random_weights(TINY_SHAPE, seed=7).items()}
    (saved / "model.safetensors").unlink()
    names = sorted(weights)
    save_file({name: weights[name] for name in names[:7]}, saved / "model-00001-of-00002.safetensors")
    save_file({name: weights[name] for name in names[7:]}, saved / "model-00002-of-00002.safetensors")
    _, loaded = load_checkpoint(saved, torch.float32)
    assert all(torch.equal(loaded[name], weights[name].float()) for name in names)


def test_newer_rope_parameters(saved: Path) -> None:
    edit(saved, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    assert load_checkpoint(saved, torch.float32)[0].rope_theta == 5e5


def test_defaults_of_older_configs(saved: Path) -> None:
    path = saved / "config.json"
    content = json.loads(path.read_text())
    for name in ("head_dim", "rope_theta", "tie_word_embeddings"):
        del content[name]
    path.write_text(json.dumps(content))
    assert load_checkpoint(saved, torch.float32)[0] == TINY_SHAPE


def damage(name: str) -> Callable[[Path], None]:
    """One way a checkpoint can be broken."""

    def no_weights(folder: Path) -> None:
        (folder / "model.safetensors").unlink()

    def cut_weights(folder: Path) -> None:
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:100])

    def missing_tensor(folder: Path) -> None:
        weights = random_weights(TINY_SHAPE, seed=7)
        del weights["model.layers.1.mlp.up_proj.weight"]
        save_file(weights, folder / "model.safetensors")

    def no_config(folder: Path) -> None:
        (folder / "config.json").unlink()

    def broken_config(folder: Path) -> None:
        (folder / "config.json").write_text("{")

    def listed_config(folder: Path) -> None:
        (folder / "config.json").write_text("[]")

    return {
        kind.__name__: kind
        for kind in (no_weights, cut_weights, missing_tensor, no_config, broken_config, listed_config)
    }[name]


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("no_weights", "holds no *.safetensors file"),
        ("cut_weights", "model.safetensors': cannot be read"),
        ("missing_tensor", "tensor model.layers.1.mlp.up_proj.weight is missing"),
        ("no_config", "config.json': cannot be read"),
        ("broken_config", "config.json': cannot be read"),
        ("listed_config", "not a JSON object"),
    ],
)
def test_damaged_checkpoint(saved: Path, name: str, rule: str) -> None:
    damage(name)(saved)
    refused(saved, rule)


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"hidden_size": 48}, "config.json asks for"),
        ({"hidden_size": "wide"}, "hidden_size is 'wide'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_key_value_heads": 3}, "do not divide evenly"),
        ({"model_type": "gpt2"}, "model_type is 'gpt2'"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling is"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "rope_type is 'llama3'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"vocab_size": 100}, "byte tokenizer needs 258"),
        ({"rope_theta": -1}, "rope_theta is -1"),
    ],
)
def test_config_that_cannot_be_served(saved: Path, changes: dict[str, object], rule: str) -> None:
    edit(saved, **changes)
    refused(saved, rule)


def test_missing_directory(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "no such directory")


def refused(folder: Path, rule: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        Engine(tiny(checkpoint=folder))
    assert str(folder) in str(error.value)
    assert rule in str(error.value)
    assert error.value.remedy.endswith(".")


def test_tokenizer_round_trip() -> None:
    text = "Grüße, 世界!"
    tokens = encode(text, bos=True)
    assert tokens[0] == 256
    assert tokens.max() < 258
    assert decode(tokens) == text
