"""An app over a hub with one fake rank, and clients for it."""

from __future__ import annotations

from contextlib import contextmanager

import httpx
import pytest
from anyio.from_thread import start_blocking_portal

from canary_obs.config import ServiceConfig
from canary_obs.hub.hub import Hub
from canary_obs.records import CancelSweep, Identity, StartDrill, StartSweep, SweepReport
from canary_obs.service.app import create_app
from canary_obs.vocabulary import SweepStatus
from tests.service.fakes import drilled, hello, identity, progress, snapshot

URL = "http://127.0.0.1"


def check_problem(answer, status, kind=None):
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"
    document = answer.json()
    assert document.keys() >= {"type", "title", "status", "detail", "instance"}
    assert document["status"] == status
    assert document["instance"] == answer.request.url.path
    assert document["detail"]
    assert document["type"] == (f"urn:canary-obs:problem:{kind}" if kind else "about:blank")
    return document


def bearer(token):
    return {"Authorization": f"Bearer {token}".encode()}


class AppClient:
    """A synchronous client of an ASGI app, usable from any thread."""

    def __init__(self, app, portal, client: httpx.AsyncClient) -> None:
        self.app, self._portal, self._client = app, portal, client

    def request(self, method: str, path: str, **options) -> httpx.Response:
        return self._portal.call(lambda: self._client.request(method, path, **options))

    def cookie(self, name: str) -> str | None:
        return self._client.cookies.get(name)

    def get(self, path: str, **options) -> httpx.Response:
        return self.request("GET", path, **options)

    def post(self, path: str, **options) -> httpx.Response:
        return self.request("POST", path, **options)

    def put(self, path: str, **options) -> httpx.Response:
        return self.request("PUT", path, **options)

    def delete(self, path: str, **options) -> httpx.Response:
        return self.request("DELETE", path, **options)


@contextmanager
def client_of(app, base_url: str = URL):
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    with start_blocking_portal() as portal:
        client = httpx.AsyncClient(transport=transport, base_url=base_url)
        yield AppClient(app, portal, client)
        portal.call(client.aclose)


class FakeRank:
    """A rank without a thread or link: it answers commands inside the call.

    With `finishes` it answers sweeps and drills as finished.
    """

    def __init__(
        self, hub: Hub, *, finishes: bool = True, sends_hello: bool = True, who: Identity | None = None
    ) -> None:
        self.hub, self.finishes = hub, finishes
        self.identity = identity() if who is None else who
        self.ends_as = SweepStatus.PASSED
        self.received = []
        if sends_hello:
            self.send(hello(self.identity))
        self.send(snapshot(self.identity, 1))

    def send(self, message) -> None:
        self.hub.ingest(message, self.execute)

    def execute(self, command) -> None:
        self.received.append(command)
        if isinstance(command, StartSweep) and self.finishes:
            self.report(command.id, self.ends_as)
        elif isinstance(command, StartDrill) and self.finishes:
            self.send(drilled(self.identity, command.id))
        elif isinstance(command, CancelSweep):
            self.report(command.id, SweepStatus.CANCELLED)

    def report(self, sweep_id: str, status: SweepStatus) -> None:
        self.send(SweepReport(identity=self.identity, progress=progress(sweep_id, status, checked=100)))


@pytest.fixture
def hub():
    return Hub(ServiceConfig(snapshot_stale_seconds=600.0))


@pytest.fixture
def rank(hub):
    return FakeRank(hub)


@pytest.fixture
def client(hub):
    with client_of(create_app(hub)) as client:
        yield client
