"""/canary/events through uvicorn, with a streaming client."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import ExitStack, contextmanager

import httpx
import msgspec
import pytest
from starlette.requests import Request

from canary_obs.config import ServiceConfig
from canary_obs.hub.hub import Hub
from canary_obs.records import SweepReport, Violations
from canary_obs.serve import ServiceThread
from canary_obs.service.app import create_app
from canary_obs.service.auth import CALLER_KEY, SignedIn
from canary_obs.service.event_stream import EVENTS_KEPT
from canary_obs.service.problems import Problem
from canary_obs.service.routes.events import STREAMS_MAX, events
from canary_obs.service.token_store import ANONYMOUS
from canary_obs.transport.links import LocalLink
from canary_obs.vocabulary import SweepStatus
from tests.service.conftest import check_problem
from tests.service.fakes import eventually, hello, identity, progress, snapshot, violation

ME = identity()
# Streams are many, and a client loads the machine's certificates, over plain HTTP as well.
PLAIN = {"timeout": 30, "verify": False}


class RunningService:
    """A running service; messages of a fake engine go straight into its hub."""

    def __init__(self, config: ServiceConfig) -> None:
        self._thread = ServiceThread(config, link=LocalLink())
        self.url, self.port, self.close = self._thread.url, self._thread.port, self._thread.close
        self.socket = self._thread._socket
        self.send(hello(ME))
        self.send(snapshot(ME, 1))

    def send(self, message) -> None:
        self._thread.hub.ingest(message, lambda command: None)

    def violate(self, *slots: int) -> None:
        self.send(Violations(identity=ME, rows=tuple(map(violation, slots))))

    @contextmanager
    def stream(self, last: str | None = None):
        headers = {} if last is None else {"Last-Event-ID": last}
        url = f"{self.url}/canary/events"
        with httpx.stream("GET", url, headers=headers, **PLAIN) as answer:
            assert answer.status_code == 200
            yield Stream(answer)


class Stream:
    """A server-sent event client that resembles a browser."""

    def __init__(self, answer: httpx.Response) -> None:
        self.answer = answer
        self._lines = answer.iter_lines()

    def next(self) -> dict:
        """The next event: id, event and data."""
        fields: dict = {}
        for line in self._lines:
            name, _, value = line.partition(": ")
            if line:
                fields[name] = json.loads(value) if name == "data" else value
            elif fields.keys() > {"event"}:
                return fields
            else:
                fields = {}
        raise EOFError

    def comment(self) -> str:
        """The next comment line."""
        return next(line for line in self._lines if line.startswith(":"))

    def until(self, kind: str) -> list[dict]:
        """The next events, up to and including the first of a kind."""
        events = [self.next()]
        while events[-1]["event"] != kind:
            events.append(self.next())
        return events


@pytest.fixture
def config(tmp_path):
    return ServiceConfig(
        endpoint=f"ipc://{tmp_path}/service.sock",
        port=0,
        log_file=str(tmp_path / "v.log"),
        snapshot_stale_seconds=600.0,
    )


@pytest.fixture
def service(config):
    service = RunningService(config)
    yield service
    service.close()


def test_a_stream_begins_with_the_state_and_sends_every_event(service):
    with service.stream() as stream:
        assert stream.answer.headers["content-type"].startswith("text/event-stream")
        assert stream.answer.headers["cache-control"] == "no-store"
        first = stream.next()
        assert (first["event"], first["data"]["state"], first["data"]["identity"]) == ("state", "ok", None)
        service.violate(7)
        events = stream.until("incident_opened")[-2:]
        assert events[0]["event"] == "violation"
        assert events[0]["data"]["violation"]["slot"] == 7
        assert events[1]["data"]["id"] == events[0]["data"]["incident"]
        service.send(snapshot(ME, 2, violations=1))
        change = stream.until("state")[-1]["data"]
        assert (change["before"], change["state"]) == ("ok", "violated")
        service.send(SweepReport(identity=ME, progress=progress("s1", SweepStatus.RUNNING)))
        assert stream.until("sweep_begun")[-1]["data"]["id"] == "s1"
        service.send(SweepReport(identity=ME, progress=progress("s1", SweepStatus.VIOLATED)))
        assert stream.until("sweep_ended")[-1]["data"]["status"] == "violated"
        httpx.post(f"{service.url}/canary/acknowledge")
        assert stream.until("incident_closed")[-1]["data"]["acknowledged"] is True


def test_a_client_that_reconnects_receives_every_event_once(service):
    with service.stream() as stream:
        stream.next()
        service.violate(1)
        last_id = stream.until("violation")[-1]["id"]
    service.violate(2, 3)
    with service.stream(last=last_id) as stream:
        events = stream.until("violation")
        service.violate(4)
        while "violation" not in events[-1]["data"] or events[-1]["data"]["violation"]["slot"] != 4:
            events.append(stream.next())
    slots = [event["data"]["violation"]["slot"] for event in events if event["event"] == "violation"]
    assert slots == [2, 3, 4]
    numbers = [int(event["id"].partition("-")[2]) for event in events]
    assert numbers == list(range(int(last_id.partition("-")[2]) + 1, numbers[-1] + 1))


@pytest.mark.parametrize("last", ["other-3", "3", "", "nonsense"])
def test_an_event_id_of_another_epoch_starts_at_the_beginning_after_dropped(service, last):
    service.violate(1)
    with service.stream(last=last) as stream:
        gap = stream.next()
        assert (gap["event"], gap["data"]) == ("dropped", {"count": None})
        assert stream.until("violation")[-1]["data"]["violation"]["slot"] == 1
    epoch = gap["id"].partition("-")[0]
    with service.stream(last=f"{epoch}-99999") as stream:
        assert stream.next()["event"] == "dropped"


def test_a_slow_client_delays_no_other_and_receives_dropped(service):
    with service.stream() as quick, socket.socket() as slow:
        quick.next()
        service.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # of what it accepts from now on
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", service.port))
        slow.settimeout(30)
        slow.sendall(b"GET /canary/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        received = slow.recv(1)
        # Each batch fits into the history, and none of them into the buffers on the way.
        for end in range(EVENTS_KEPT, 4 * EVENTS_KEPT, EVENTS_KEPT):
            service.violate(*range(end - EVENTS_KEPT, end))
            while quick.until("violation")[-1]["data"]["violation"]["slot"] != end - 1:
                pass
        while b"event: dropped" not in received:
            received = received[-100:] + slow.recv(1 << 16)


def test_a_quiet_stream_is_kept_alive(config):
    service = RunningService(msgspec.structs.replace(config, events_heartbeat_seconds=0.01))
    with service.stream() as stream:
        stream.next()
        assert [stream.comment() for _ in range(3)] == [": heartbeat"] * 3
    service.close()


def test_the_service_ends_with_streams_open(service):
    with service.stream() as stream:
        stream.next()
        service.close()
        with pytest.raises(EOFError):  # a clean end of the answer; cut off, httpx would say so
            stream.until("never")


def test_the_number_of_streams_is_limited(service):
    url = f"{service.url}/canary/events"
    with ExitStack() as rest:
        with ExitStack() as first:
            kept = [first.enter_context(service.stream())]
            kept += [rest.enter_context(service.stream()) for _ in range(STREAMS_MAX - 1)]
            assert [stream.next()["event"] for stream in kept] == ["state"] * STREAMS_MAX
            check_problem(httpx.get(url, **PLAIN), 503, "too-many-streams")
        eventually(lambda: opened(url))


def test_streams_that_begin_at_once_are_counted_before_their_first_frame():
    app = create_app(Hub())
    signed_in = SignedIn(ANONYMOUS, None, app.state.context.sign_in)
    request = Request({"type": "http", "app": app, "headers": [], CALLER_KEY: signed_in})
    stream = app.state.context.event_stream

    async def begin() -> None:
        answers = [await events(request) for _ in range(STREAMS_MAX)]
        with pytest.raises(Problem, match="32 streams are open"):
            await events(request)
        assert stream.open_streams == STREAMS_MAX
        stream.close()
        for answer in answers:
            await answer({"type": "http"}, asyncio.Event().wait, dropped_message)
        assert stream.open_streams == 0

    asyncio.run(begin())


async def dropped_message(message: object) -> None:
    """A client that reads and keeps nothing."""


def opened(url):
    with httpx.stream("GET", url, **PLAIN) as answer:
        return answer.status_code == 200
