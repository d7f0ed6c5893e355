"""A fleet for Prometheus: services with 64 ranks each, which show their real page of metrics over HTTP."""

from __future__ import annotations

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec

from canary_obs.hub.hub import Hub
from canary_obs.records import EngineMessage, Snapshot, Violations
from canary_obs.telemetry.exposition import Exposition
from canary_obs.telemetry.prometheus import HubCollector
from canary_obs.vocabulary import State
from tests.service.fakes import counters, hello, identity, snapshot, violation

RANKS = 64


STEPS = 6


class FleetService:
    """The hub of one engine. Every scrape finds each rank one step further on, up to `steps`.

    The pages are made beforehand: Prometheus and the tests share the processor with them.
    """

    def __init__(self, number: int, steps: int = STEPS) -> None:
        self.instance = f"engine-{number}"
        self.hub = Hub()
        self._step = 0
        self._ranks = [identity(rank, instance=self.instance) for rank in range(RANKS)]
        self._exposition = Exposition(HubCollector(self.hub))
        for who in self._ranks:
            self._send(hello(who))
        pages = iter(lasting := [self._page() for _ in range(steps)])

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body, content_type = next(pages, lasting[-1])
                self.send_response(200)
                self.send_header("content-type", content_type)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments: object) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def _page(self) -> tuple[bytes, str]:
        """The page after another step of every rank, and its content type."""
        self._step += 1
        for number, who in enumerate(self._ranks):
            now = time.time_ns()
            plain = snapshot(
                who, self._step, time_ns=now, last_sweep_ns=now - number * 10**9, perturbations={},
                overhead_seconds={"head": 0.002 * self._step, "tail": 0.005 * self._step},
            )  # fmt: skip
            self._send(self._with_trouble(number, plain))
        return self._exposition.page("")

    def _with_trouble(self, number: int, plain: Snapshot) -> Snapshot:
        """Two ranks of engine-3 are damaged, one of engine-1 is degraded, one of engine-2 blind."""
        if self.instance == "engine-3" and number in (5, 17):
            self._send(Violations(identity=plain.identity, rows=(violation(slot=100 + self._step),)))
            changes = {"groups": {"full": counters(self._step, self._step)}, "state": State.VIOLATED}
        elif (self.instance, number) == ("engine-1", 40):
            changes = {"state": State.DEGRADED, "state_reasons": ("coverage 80 %",)}
        elif (self.instance, number) == ("engine-2", 9):
            changes = {"state": State.BLIND, "state_reasons": ("a kernel has stalled",)}
        else:
            return plain
        return msgspec.structs.replace(plain, **changes)

    def _send(self, message: EngineMessage) -> None:
        self.hub.ingest(message, lambda command: None)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
