"""The load is a function of its seed, fits the engine, and exercises everything."""

from __future__ import annotations

from dataclasses import replace
from importlib.resources import files

import numpy as np
import pytest

from canary_obs.reference_engine.engine import Engine
from canary_obs.reference_engine.settings import EngineConfig, demo, tiny
from canary_obs.reference_engine.tokenizer import BOS, decode
from canary_obs.reference_engine.traffic import Traffic, corpus, scaled_traffic
from tests.sizes import sized


class Sink(Engine):
    """Takes requests and finishes them unrun, as fast as they come."""

    def step(self):  # type: ignore[no-untyped-def]
        for request in self.unfinished:
            self.abort(request.id)
        return ()


def prompts(config: EngineConfig, seed: int, steps: int) -> list[bytes]:
    engine, traffic = Sink(config), Traffic(scaled_traffic(config.max_context), seed)
    found = []
    for _ in range(steps):
        known = len(engine.unfinished)
        traffic.advance(engine)
        found += [r.tokens[: r.length].tobytes() for r in engine.unfinished[known:]]
        engine.step()
    return found


def test_seed_decides() -> None:
    first = prompts(tiny(), 1, 60)
    assert len(first) > 20
    assert prompts(tiny(), 1, 60) == first
    assert prompts(tiny(), 2, 60) != first


def test_prompts_are_text_behind_shared_prefixes() -> None:
    found = [np.frombuffer(item, dtype=np.int32) for item in prompts(demo(), 1, 300)]
    assert all(tokens[0] == BOS for tokens in found)
    assert len({tokens[:60].tobytes() for tokens in found}) == 6
    # A cut may split a character; all else is text of the corpus.
    longest = max(found, key=len)
    assert any(decode(longest[60:])[size : size + 12] in corpus() for size in range(4))


@pytest.mark.parametrize(
    "config", [replace(demo(), shape=tiny().shape), tiny(), tiny(max_context=64), tiny(page_size=16)]
)
def test_every_prompt_fits(config: EngineConfig) -> None:
    engine, traffic = Engine(config), Traffic(scaled_traffic(config.max_context), 4)
    steps = 60 if config.max_context > 128 else 250
    for _ in range(steps):
        traffic.advance(engine)
        engine.step()
    assert engine.statistics.requests_finished > 0


def test_conversations_go_on() -> None:
    config = tiny(num_slots=1024)
    engine = Engine(config)
    traffic = Traffic(replace(scaled_traffic(config.max_context), follow_up_rate=1.0, arrivals=0.5), 1)
    histories: set[bytes] = set()
    continued = 0
    for _ in range(200):
        known = set(engine.unfinished)
        traffic.advance(engine)
        for request in set(engine.unfinished) - known:
            prompt = request.tokens[: request.length].tobytes()
            continued += any(prompt.startswith(history) for history in histories)
        histories |= {request.tokens[: request.length].tobytes() for request in engine.step()}
    assert continued > 10
    assert engine.statistics.prefix_hit_tokens > 500


def test_arrivals_are_bounded() -> None:
    engine, config = Engine(tiny()), replace(scaled_traffic(128), arrivals=30.0, max_unfinished=10)
    traffic = Traffic(config, 1)
    for _ in range(5):
        traffic.advance(engine)
        assert len(engine.unfinished) <= 10


def test_no_aborts_when_off() -> None:
    engine, traffic = Engine(tiny()), Traffic(replace(scaled_traffic(128), abort_rate=0.0), 1)
    for _ in range(100):
        traffic.advance(engine)
        engine.step()
    assert engine.statistics.aborts == 0


def test_demo_preset_exercises_everything() -> None:
    """Within the thousand steps that the demo promises, or fewer, at a fraction of the model's cost."""
    engine = Engine(replace(demo(), shape=tiny().shape))
    traffic = Traffic(scaled_traffic(512), 1)
    for _ in range(sized(1000, 400)):
        traffic.advance(engine)
        engine.step()
    seen = engine.statistics
    assert seen.steps == sized(1000, 400)
    assert min(seen.evictions, seen.preemptions, seen.aborts, seen.requests_finished) > 0
    assert seen.prefix_hit_tokens > 1000


def test_corpus_is_small_and_stated() -> None:
    assert 50_000 < len(corpus()) < 200_000
    folder = files("canary_obs.reference_engine") / "corpus"
    shipped = [item.name for item in folder.iterdir()]
    stated = (folder / "README.txt").read_text()
    assert sorted(shipped) == ["README.txt", "jargon.txt"]
    assert "jargon.txt" in stated
    assert "public domain" in stated
