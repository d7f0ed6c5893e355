"""Bounds on the web server's connections: how many, and how long one may take to send a request."""

from __future__ import annotations

import asyncio
import resource
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_SECONDS = 5.0  # from the first byte, or from connecting, to the end of a request's headers
_MOST_CONNECTIONS = 4096
_WANTED_FILES = 65536


def raise_open_files() -> None:
    """Raise this process's soft limit of open files as far as its hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED_FILES if hard == resource.RLIM_INFINITY else min(hard, _WANTED_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def most_connections() -> int:
    """How many connections leave a quarter of the open files, at least 256, to engines and logs."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MOST_CONNECTIONS
    return max(16, min(_MOST_CONNECTIONS, soft - max(256, soft // 4)))


class BoundedProtocol(H11Protocol):
    """One connection. At the limit, the one that has waited longest without a request makes room."""

    limit = _MOST_CONNECTIONS

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._deadline: asyncio.TimerHandle | None = None  # of the request that is awaited

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept, or make room first."""
        super().connection_made(transport)
        self._await_request()
        if len(self.connections) > self.limit:
            waiting = [one for one in self.connections if isinstance(one, BoundedProtocol) and one.waits]
            min(waiting, key=lambda one: one.waits_until, default=self).drop()

    def data_received(self, data: bytes) -> None:
        """Receive; the time limit ends with the headers of a request."""
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._await_request()
        else:
            self._request_arrived()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._request_arrived()
        super().connection_lost(exc)

    def drop(self) -> None:
        """Close at once. It counts no more as of now: many connections may come before it is gone."""
        self._request_arrived()
        self.connections.discard(self)
        self.transport.abort()

    @property
    def waits(self) -> bool:
        """Whether a request is awaited; between requests of one connection, uvicorn's own limit holds."""
        return self._deadline is not None

    @property
    def waits_until(self) -> float:
        """When waiting ends, by the loop's clock."""
        return self._deadline.when() if self._deadline is not None else float("inf")

    def _await_request(self) -> None:
        if self._deadline is None and not self.transport.is_closing():
            self._deadline = self.loop.call_later(REQUEST_SECONDS, self.transport.abort)

    def _request_arrived(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
