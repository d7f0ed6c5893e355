"""A hub for tests."""

from __future__ import annotations

import itertools

from canary_obs.config import ServiceConfig
from canary_obs.hub.hub import Hub
from canary_obs.records import StartSweep
from tests.service.fakes import hello, identity, snapshot


class Harness:
    """A hub on a clock that only the test advances, and the commands it sent to each rank."""

    def __init__(self, **settings):
        self.now = 100.0
        self.wall = 2_000_000_000_000
        self.commands = {}
        self.sequence = itertools.count(1)
        self.hub = Hub(
            ServiceConfig(**settings), clock=lambda: self.now, wall_ns=lambda: self.wall, boot="this host"
        )

    def send(self, *messages):
        for message in messages:
            received = self.commands.setdefault(message.identity.key, [])
            self.hub.ingest(message, received.append)

    def attach(self, rank=0, **changes):
        me = identity(rank, **changes)
        self.send(hello(me), self.snapshot(me))
        return me

    def snapshot(self, me, **changes):
        return snapshot(me, next(self.sequence), time_ns=self.wall, **changes)

    def received(self, kind, rank=0):
        return [command for command in self.commands[identity(rank).key] if isinstance(command, kind)]

    def sweep_id(self, rank=0):
        return self.received(StartSweep, rank)[-1].id
