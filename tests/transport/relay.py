"""A TCP relay whose connections can go silent without being closed."""

from __future__ import annotations

import selectors
import socket
import threading
from contextlib import suppress


class Relay:
    """Forwards connections to `port` on loopback. After `cut`, open ones stay open but carry nothing."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self._peers: dict[socket.socket, socket.socket] = {}
        self._cut_ends: set[socket.socket] = set()
        self.closed_after_cut = 0  # ends that the peer closed after `cut`
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def connections(self) -> int:
        """Connections since the start; each has two ends."""
        return len(self._peers) // 2

    def cut(self) -> int:
        """Stop forwarding on all open connections; returns how many ends they have."""
        self._cut_ends |= set(self._peers)
        return len(self._cut_ends)

    def close(self) -> None:
        """Close everything."""
        self._stop.set()
        self._thread.join()
        for end in (self._server, *self._peers):
            end.close()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._server, selectors.EVENT_READ)
            while not self._stop.is_set():
                for key, _ in selector.select(0.02):
                    end = key.fileobj
                    assert isinstance(end, socket.socket)
                    if end is self._server:
                        self._accept(selector)
                    else:
                        self._forward(end, selector)

    def _accept(self, selector: selectors.BaseSelector) -> None:
        near, _ = self._server.accept()
        far = socket.create_connection(("127.0.0.1", self._target))
        self._peers |= {near: far, far: near}
        for end in (near, far):
            selector.register(end, selectors.EVENT_READ)

    def _forward(self, end: socket.socket, selector: selectors.BaseSelector) -> None:
        data = b""
        with suppress(ConnectionError):
            data = end.recv(65536)
        if not data:
            selector.unregister(end)
            if end in self._cut_ends:
                self.closed_after_cut += 1
            else:
                with suppress(OSError):
                    self._peers[end].shutdown(socket.SHUT_WR)
        elif end not in self._cut_ends:
            with suppress(OSError):
                self._peers[end].sendall(data)
