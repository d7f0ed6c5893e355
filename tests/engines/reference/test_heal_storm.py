"""Healing under traffic that preempts, aborts and resets: nothing is left behind, whatever is healed."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from canary_obs.attach import install_canary
from canary_obs.config import IN_PROCESS, CanaryConfig
from canary_obs.engines.reference.heal_actions import ReferenceActions
from canary_obs.engines.reference.heal_groups import Place
from canary_obs.errors import QuarantineRefused
from canary_obs.healing.plan import Block
from canary_obs.reference_engine import settings
from canary_obs.reference_engine.engine import Engine
from canary_obs.reference_engine.scheduling.request import Sampling, Status
from canary_obs.vocabulary import HealPolicy
from tests.engines.reference.heal.serve import leaks
from tests.engines.reference.heal.storm import MODELS, Storm, clean, differences, endure

_EVERYDAY = ("llama", "host_tier", "swa")  # the others take longer


@pytest.mark.parametrize(
    "model",
    [model if model in _EVERYDAY else pytest.param(model, marks=pytest.mark.slow) for model in MODELS],
)
def test_a_storm_of_healing_leaves_a_clean_engine(model: str) -> None:
    found = endure(model, 160 if model == "compressed" else 100)  # until a slot was damaged twice
    assert clean(found), found
    assert found["events"].keys() >= {"aborts", "resets"}
    assert found["events"]["preemptions"] > 0
    done = {what.split()[0] for what in found["actions"] if what.endswith(" done")}
    assert done == {"evict", "recompute", "end", "quarantine", "release"}


@pytest.mark.parametrize("model", ["llama", "mla_sparse", "speculative", "swa", "compressed"])
def test_quarantine_leaves_room_for_the_longest_request(model: str) -> None:
    engine = Engine(settings.with_model(settings.tiny(seed=3, page_size=4, max_running=6), model))
    canary = install_canary(engine, CanaryConfig(endpoint=IN_PROCESS, heal=HealPolicy.PROTECT))
    assert canary is not None
    canary.mark_ready()
    actions = canary._adapter.healing._actions  # type: ignore[union-attr]
    refused = set()
    for group, number in _blocks(engine, actions):
        try:
            actions.quarantine((group, number))
        except QuarantineRefused:
            refused.add(group)
    assert refused == set(range(len(actions._groups)))
    longest = engine.config.max_context - 8
    request = engine.add_request(
        np.arange(longest, dtype=np.int32) % 200 + 4, Sampling(max_tokens=8, stop_at_eos=False)
    )
    for _ in range(longest):
        engine.step()
        if request.done:
            break
    assert request.status is Status.FINISHED
    canary.detach()
    Storm(engine, canary, 0).empty_cache()
    assert [*leaks(engine), *differences(engine)] == []


def _blocks(engine: Engine, actions: ReferenceActions) -> Iterator[Block]:
    """All blocks of every group."""
    sizes = {
        Place.PAGE: engine.scheduler.allocator.num_pages, Place.WINDOW: engine.config.swa_slots,
        Place.BUFFER: 2 * engine.config.max_running,
    }  # fmt: skip
    for group in actions._groups:
        yield from ((group.number, number) for number in range(sizes[group.place]))
