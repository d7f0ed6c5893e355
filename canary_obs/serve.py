"""The service process: listener, hub, logs, tracing and web application."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn

from canary_obs.config import PREFIX, ServiceConfig, load, masked
from canary_obs.devices.health import DeviceHealth
from canary_obs.devices.sampler import DeviceSampler
from canary_obs.errors import AddressInUse, CanaryError, ConfigurationError
from canary_obs.hub.hub import Hub
from canary_obs.service.app import create_app
from canary_obs.service.connections import BoundedProtocol, most_connections, raise_open_files
from canary_obs.service.context import Dependencies
from canary_obs.service.event_stream import EventStream
from canary_obs.service.state_file import StateFile
from canary_obs.service.token_store import TokenStore
from canary_obs.telemetry.audit import audit_fields
from canary_obs.telemetry.export_queue import ExportCounts
from canary_obs.telemetry.log import Event, EventLog, Fields, open_log, violation_fields
from canary_obs.telemetry.metric_export import MetricExport, open_metric_export
from canary_obs.telemetry.tracing import Tracing, open_tracing
from canary_obs.transport.keys import ServiceKeys, service_keys
from canary_obs.transport.links import LocalLink
from canary_obs.transport.listener import LocalListener, ZmqListener
from canary_obs.vocabulary import State

START_SECONDS = 30.0
SHUTDOWN_SECONDS = 5
RETRY_SECONDS = 0.5
_BACKLOG = 64  # connections that wait to be accepted


class _Server(uvicorn.Server):
    """uvicorn with an event that is set once it accepts requests."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then set `ready`."""
        await super().startup(sockets)
        self.ready.set()


class ServiceThread:
    """The whole service in threads of this process."""

    def __init__(self, config: ServiceConfig | None = None, *, link: LocalLink | None = None) -> None:
        """Start everything. Raises ConfigurationError, and then leaves nothing open.

        With `link` the engine is in this process; without, engines connect to `config.endpoint`.
        """
        self.config = ServiceConfig() if config is None else config
        token_store = TokenStore(self.config)
        keys = service_keys(self.config) if link is None else None
        self.hub = Hub(self.config)
        self._tracing: Tracing | None = None
        self._metric_export: MetricExport | None = None
        self._devices: DeviceSampler | None = None
        self._socket = bind_port(self.config)
        self._state_file: StateFile | None = None
        try:
            if self.config.state_file:
                self._state_file = StateFile(Path(self.config.state_file), self.hub)
            self._violation_log = self._open_log("violation_log", violation_fields)
            self._audit_log = self._open_log("audit_log", audit_fields)
            self.hub.subscribe(self._violation_log)
            self._tracing = self._open_tracing()
            self._metric_export = self._open_metric_export()
            if self.config.device_health == "nvml":
                self._devices = DeviceSampler(lambda error: self.hub.fault("devices", error, State.DEGRADED))
            self._listener = self._open_listener(link, keys)
        except BaseException:
            self._socket.close()
            self._close_state()
            raise
        self.port: int = self._socket.getsockname()[1]
        dependencies = Dependencies(
            log_dropped=self._log_dropped,
            exports=self._exports,
            devices=self._device_health,
            listening=lambda: self._listener.alive,
            audit=lambda event: self._audit_log((event,)),
        )
        app = create_app(self.hub, self.config, token_store=token_store, dependencies=dependencies)
        self._event_stream: EventStream = app.state.context.event_stream
        protocol = type("_Protocol", (BoundedProtocol,), {"limit": most_connections()})
        options: dict[str, Any] = {"log_config": None, "access_log": False, "lifespan": "off"}
        options |= {"http": protocol, "timeout_graceful_shutdown": SHUTDOWN_SECONDS, "server_header": False}
        options["backlog"] = _BACKLOG  # asyncio accepts as many at once, before any of them is counted
        self._server = _Server(uvicorn.Config(app, **options))
        self._thread = threading.Thread(target=self._run, name="canary-web", daemon=True)
        self._thread.start()
        if not self._server.ready.wait(START_SECONDS) or not self.alive:
            self.close()
            raise CanaryError("the web server did not start; its log has the reason")

    @property
    def url(self) -> str:
        """The base URL, without a trailing slash."""
        host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
        return f"http://{host}:{self.port}"

    @property
    def alive(self) -> bool:
        """Whether the web server is running."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Finish requests, receive what engines have sent, write the logs, release everything; idempotent."""
        self._event_stream.close()
        self._server.should_exit = True
        self._thread.join()
        self._listener.close()
        self._close_state()
        self._close_telemetry()
        self._socket.close()

    def _close_state(self) -> None:
        if self._state_file is not None:
            self._state_file.close()

    def _open_log(self, part: str, fields: Callable[[Event], Fields]) -> EventLog[Event]:
        def on_drop(error: Exception) -> None:
            self.hub.fault(part, error, State.DEGRADED)

        return open_log(self.config.log_file, fields, on_drop, log_format=self.config.log_format)

    def _log_dropped(self) -> int:
        return self._violation_log.dropped + self._audit_log.dropped

    def _exports(self) -> dict[str, ExportCounts]:
        counts = self._tracing.counts if self._tracing else {}
        return counts | ({"metrics": self._metric_export.counts} if self._metric_export else {})

    def _device_health(self) -> tuple[DeviceHealth, ...]:
        return self._devices.latest() if self._devices else ()

    def _close_telemetry(self) -> None:
        if self._devices is not None:
            self._devices.close()
        if self._tracing is not None:
            self._tracing.close()
        if self._metric_export is not None:
            self._metric_export.close()
        self._violation_log.close()
        self._audit_log.close()

    def _open_metric_export(self) -> MetricExport | None:
        try:
            return open_metric_export(self.hub, self._log_dropped, self._exports, self._device_health)
        except BaseException:
            self._close_telemetry()
            raise

    def _open_tracing(self) -> Tracing | None:
        try:
            tracing = open_tracing(self.hub)
        except BaseException:
            self._close_telemetry()
            raise
        if tracing is not None:
            self.hub.subscribe(tracing)
        return tracing

    def _open_listener(self, link: LocalLink | None, keys: ServiceKeys | None) -> LocalListener | ZmqListener:
        try:
            if link is not None:
                return LocalListener(link, self.hub)
            return ZmqListener(self.config.endpoint, self.hub, keys)
        except BaseException:
            self._close_telemetry()
            raise

    def _run(self) -> None:
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self._server.ready.set()


def open_when_free(config: ServiceConfig, seconds: float, stop: threading.Event) -> ServiceThread | None:
    """The service, started once no other program has its port and endpoint; None when `stop` was set first.

    Raises ConfigurationError; AddressInUse only after `seconds`.
    """
    deadline, reported = time.monotonic() + seconds, False
    while not stop.is_set():
        try:
            return ServiceThread(config)
        except AddressInUse as error:
            if time.monotonic() >= deadline:
                raise
            if not reported:
                text = f"canary_obs service waits up to {seconds:g} s to take over: {error}"
                _say(text)
            reported = True
        stop.wait(RETRY_SECONDS)
    return None


def serve(config: ServiceConfig | None = None, *, wait_seconds: float = 0.0) -> None:
    """Run until SIGTERM or SIGINT. Raises ConfigurationError when the service cannot start.

    Waits `wait_seconds` for another service to release the port and the endpoint.
    """
    config = load(ServiceConfig) if config is None else config
    raise_open_files()
    stop = threading.Event()

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    # Installed before the threads start, so that an early signal also ends the service cleanly.
    previous = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        service = open_when_free(config, wait_seconds, stop)
        if service is None:
            return
        try:
            settings = " ".join(f"{name}={value}" for name, value in masked(config).items())
            _say(f"canary_obs service at {service.url}, settings: {settings}")
            while not stop.wait(1.0):
                if not service.alive:
                    raise CanaryError("the web server stopped unexpectedly; its log has the reason")
        finally:
            service.close()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _say(text: str) -> None:
    """A line on standard error; where that is full or closed the service serves without it."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            print(text, file=sys.stderr, flush=True)


def bind_port(config: ServiceConfig) -> socket.socket:
    """A listening socket on the configured host and port. Raises ConfigurationError."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        server = socket.create_server((config.host, config.port), family=family, backlog=_BACKLOG)
        # Accepted sockets inherit it. asyncio sets it only where a socket's protocol is given; without it
        # answers on a reused connection wait 40 ms for the client's delayed acknowledgement.
        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return server
    except OSError as error:
        address = f"{config.host}:{config.port}"
        # create_server raises what the resolver says as a plain OSError; its numbers are negative.
        number = error.errno or 0
        rule = f"{address} cannot be bound: {os.strerror(number) if number > 0 else error}"
        if number <= 0 or number == errno.EADDRNOTAVAIL:
            remedy = f"Set {PREFIX}HOST to an address of this machine."
            raise ConfigurationError("host", config.host, rule, remedy) from None
        remedy = f"Stop the process on that port, or set {PREFIX}PORT to another port (0 = any free one)."
        kind = AddressInUse if error.errno == errno.EADDRINUSE else ConfigurationError
        raise kind("port", config.port, rule, remedy) from None
