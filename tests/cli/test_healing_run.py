"""All that healing can do to a real engine, as an operator sees it, counted once."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from canary_obs.attach import install_canary
from canary_obs.cli import run
from canary_obs.config import PREFIX, CanaryConfig, ServiceConfig
from canary_obs.heals import Heal
from canary_obs.reference_engine import settings
from canary_obs.reference_engine.engine import Engine
from canary_obs.reference_engine.scheduling.request import Request, Sampling, Status
from canary_obs.runtime.device.byte_address import locate_byte
from canary_obs.serve import ServiceThread
from canary_obs.service.event_stream import EventKind, EventStream
from canary_obs.transport.links import LocalLink
from canary_obs.vocabulary import HealAction, HealOutcome, HealPolicy
from tests.service.test_event_stream import Clock

TOKEN, PAGE, SECONDS = "operate-0123456789abcdef", 4, 60.0
Counts = Counter[tuple[str, str]]  # of actions with their outcomes


@dataclass(slots=True)
class Run:
    """An engine with a canary, and the service that it reports to."""

    engine: Engine
    canary: Any
    service: ServiceThread
    cli: Callable[[str], str]
    heals: list[Heal] = field(default_factory=list)
    asked: int = 0

    def ask(self, tokens: int) -> Request:
        """A prompt that no other one begins with."""
        self.asked += 1
        draw = np.random.default_rng(self.asked)
        prompt = draw.integers(4, 200, size=24, dtype=np.int32)
        return self.engine.add_request(prompt, Sampling(max_tokens=tokens, stop_at_eos=False))

    def serve(self, tokens: int = 4) -> Request:
        """One request, from its beginning to its end."""
        request = self.ask(tokens)
        while self.engine.has_work():
            self.engine.step()
        return request

    def harm(self, slot: int, words: int) -> None:
        """Change so many words of the slot's keys, and let the checks meet it."""
        for byte in range(4 * words):
            locate_byte(self.canary._adapter.groups[0].sources[0], slot, byte).flip(0xFF)
        self.canary.check_everything()

    def until(self, holds: Callable[[], bool]) -> None:
        """Serve until what was sent to the service is shown there."""
        deadline = time.monotonic() + SECONDS
        while not holds():
            assert time.monotonic() < deadline
            self.serve(tokens=1)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.service.url + path, headers={"Authorization": f"Bearer {TOKEN}"})

    def count(self) -> Counts:
        return Counter((one.action.value, one.outcome.value) for one in self.heals)


@pytest.fixture
def real(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Run]:
    link = LocalLink(capacity=1 << 20)
    service = ServiceThread(ServiceConfig(port=0, token=TOKEN, log_file=str(tmp_path / "log")), link=link)
    for name, value in (("URL", service.url), ("TOKEN", TOKEN)):
        monkeypatch.setenv(PREFIX + name, value)
    monkeypatch.setenv("COLUMNS", "220")

    def cli(line: str) -> str:
        run(line.split())
        return capsys.readouterr().out

    engine = Engine(settings.tiny(seed=3, page_size=PAGE))
    config = CanaryConfig(
        patrol_budget="1B/s", heal=HealPolicy.REPAIR, heal_pool_share=1.0, heal_actions_per_minute=1000
    )
    canary = install_canary(engine, config, link=link)
    assert canary is not None
    canary.mark_ready()
    made = Run(engine, canary, service, cli)
    send = canary.healing._send
    canary.healing._send = lambda heals: (made.heals.extend(heals), send(heals))[1]
    yield made
    canary.detach()
    service.close()


def do_everything(real: Run) -> None:
    """Every action at least once."""
    real.harm(int(real.serve().slots[1]), words=1)  # put back
    idle = int(real.serve().slots[1])
    real.harm(idle, words=2)  # leaves the cache
    while idle not in real.serve().slots[:24].tolist():
        pass
    real.harm(idle, words=2)  # is damaged again: leaves circulation
    ended, restarted = real.ask(tokens=12), real.ask(tokens=12)
    for _ in range(4):
        real.engine.step()
    table, row = real.engine.runner.pool.req_to_token, restarted.row
    right = table[row, :PAGE].clone()
    table[row, :PAGE] = torch.arange(idle // PAGE * PAGE, (idle // PAGE + 1) * PAGE, dtype=table.dtype)
    real.engine.step()
    table[row, :PAGE] = right
    real.harm(int(ended.slots[1]), words=2)
    while real.engine.has_work():
        real.engine.step()
    assert (ended.status, restarted.status) == (Status.FAILED, Status.FINISHED)
    real.cli("heal --release-all")
    real.until(lambda: real.count()["release", "done"] > 0)


def counted(real: Run) -> Counts:
    """By the metric that panel and alert read."""
    found = re.findall(
        r'^kv_canary_heals_total\{action="(\w+)".*outcome="(\w+)".*\} ([1-9].*)$',
        real.get("/metrics").text,
        re.M,
    )
    return Counter({(action, outcome): int(float(count)) for action, outcome, count in found})


def test_each_action_is_in_incidents_events_metrics_and_commands(real: Run) -> None:
    stream = EventStream(real.service.hub, Clock())
    do_everything(real)
    done = real.count()
    assert {action for action, outcome in done if outcome == "done"} == {one.value for one in HealAction}
    assert done["repair", HealOutcome.REFUSED.value] > 0
    real.until(lambda: counted(real) == real.count())
    assert real.count() == done
    of_incidents = Counter({what: count for what, count in done.items() if what[0] != "release"})
    names = [one["id"] for one in real.get("/canary/incidents").json()["incidents"]]
    shown = [real.get(f"/canary/incidents/{name}").json()["incident"]["heals"] for name in names]
    assert Counter((one["action"], one["outcome"]) for own in shown for one in own) == of_incidents
    stream.poll()
    events = [event.data.heal for event in stream.after(0) if event.kind is EventKind.HEAL]
    assert Counter((one.action.value, one.outcome.value) for one in events) == done
    lines = [line.split("│") for name in names for line in real.cli(f"incident show {name}").splitlines()]
    rows = [tuple(map(str.strip, line[2:4])) for line in lines if len(line) > 4 and "repair" in line[4]]
    assert Counter(rows) == of_incidents
    status = real.cli("heal")
    assert all(f"{action} {outcome} {count}" in status for (action, outcome), count in done.items())
