"""A real engine with damaged KV: every answer that differs from a run without damage is listed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from canary_obs.hub.hub import Hub
from canary_obs.hub.taint_store import Taint
from canary_obs.reference_engine.scheduling.request import Sampling
from canary_obs.transport.links import LocalLink
from canary_obs.vocabulary import Completeness
from tests.links import OneThreadLink

REQUESTS, RUNNING, TOKENS = 60, 6, 16
SETTINGS = {"verify_on_hit": True, "patrol_budget": "0.05"}


@dataclass(slots=True)
class Run:
    """One run of the same requests, with faults or without."""

    rig: Any
    hub: Hub
    link: LocalLink
    answers: dict[str, list[int]] = field(default_factory=dict)

    def serve(self, faults: int | None) -> None:
        engine, draw = self.rig.engine, np.random.default_rng(5)
        families = [draw.integers(4, 200, 24, dtype=np.int32) for _ in range(6)]
        prompts = [
            np.concatenate([families[draw.integers(6)], draw.integers(4, 200, draw.integers(2, 20))])
            for _ in range(REQUESTS)
        ]
        harm = None if faults is None else np.random.default_rng(faults)
        waiting = list(enumerate(prompts))[::-1]
        while waiting or engine.has_work():
            while waiting and len(engine.unfinished) < RUNNING:
                number, prompt = waiting.pop()
                sampling = Sampling(max_tokens=TOKENS, stop_at_eos=False)
                engine.add_request(prompt.astype(np.int32), sampling, f"r{number}")
            if harm is not None and harm.random() < 0.1:
                self._damage(harm)
            for request in engine.step():
                self.answers[request.id] = request.output.tolist()
        self.rig.canary.check_everything()
        while (message := self.link.next_message(0.0)) is not None:
            self.hub.ingest(message, self.link.send_command)

    def _damage(self, harm: np.random.Generator) -> None:
        """One slot of a running request or of the cache, in one layer."""
        used = self.rig.engine.scheduler.live_slots()
        if used.size:
            source = self.rig.canary.state.by_name["full"].view.sources[0]
            slot = int(harm.choice(used))
            source.tensor[slot] = torch.randn_like(source.tensor[slot]) * 8

    @property
    def taints(self) -> list[Taint]:
        return self.hub.taints.after(0)

    @property
    def listed(self) -> set[str]:
        return {one.request for taint in self.taints for one in taint.requests}


@pytest.fixture
def make_run(make_rig: Any) -> Iterator[Any]:
    def make(**engine: object) -> Run:
        link = OneThreadLink()
        return Run(make_rig(link=link, engine=engine, **SETTINGS), Hub(), link)

    return make


@pytest.mark.parametrize("page", [1, 4])
def test_who_answers_wrongly_is_listed(make_run: Any, page: int) -> None:
    clean, damaged = make_run(page_size=page), make_run(page_size=page)
    clean.serve(None)
    damaged.serve(3)
    wrong = {name for name, answer in clean.answers.items() if damaged.answers[name] != answer}
    assert len(wrong) > REQUESTS // 10
    assert wrong - damaged.listed == set()
    assert len(damaged.listed) < REQUESTS
    assert {taint.completeness for taint in damaged.taints} == {Completeness.KNOWN}
    assert clean.taints == []
    rows = {one.request: one for taint in damaged.taints for one in taint.requests if not one.running}
    for name in wrong:
        pairs = zip(clean.answers[name], damaged.answers[name], strict=True)
        assert next(at for at, (right, own) in enumerate(pairs) if right != own) >= min(
            one.first_output for taint in damaged.taints for one in taint.requests if one.request == name
        )
        assert rows[name].first_output + rows[name].outputs <= TOKENS
